"""Probabilities from scores, fitted to valid: of answers that are shown at .8, 80 % are true.

pairs       scores of true and of other answers to the questions of valid
isotonic    a rising function of the score, for all relations together
logistic    a line for each relation, on the log odds that the function gives
calibrated  `calibration`: both for each side, kept beside the run
"""

from kgshard_tools.calibration.calibrated import Calibration, calibration, pooled

__all__ = ["Calibration", "calibration", "pooled"]
