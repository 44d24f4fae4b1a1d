"""OMult: <h r, t> over octonions, nothing normalised (Demir et al., 2021).

Rows are eighths [1 | e_1 | ... | e_7], multiplied as hypercomplex.py says. Tails: q = h r. Heads:
q = t conj(r). dicee's OMult has the same product, but divides r by its norms.
"""

from kgshard.models.hypercomplex import HypercomplexScoring


class OMult(HypercomplexScoring):
    """A relation multiplies octonions from the right."""

    num_blocks = 8
    kind = "octonion"
