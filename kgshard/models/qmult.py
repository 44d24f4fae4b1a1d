"""QMult: <h r, t> over quaternions, nothing normalised (Demir et al., 2021).

Rows are quarters [1 | i | j | k]; h r is Hamilton's product. Tails: q = h r. Heads: q = t conj(r).
dicee's QMult divides r by norms over runs of four floats of one quarter, which are not the quaternions'
norms; for unit quaternions see quate.py.
"""

from kgshard.models.hypercomplex import HypercomplexScoring


class QMult(HypercomplexScoring):
    """A relation multiplies quaternions from the right."""

    num_blocks = 4
    kind = "quaternion"
