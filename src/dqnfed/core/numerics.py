"""The number of the computations: two versions with the same one give the same bits for the same run."""

# Raised whenever a change of the sources changes the bits of some method's result. A run that was started with another
# number is not resumed: it would end with a result that neither version gives. `tests/unit/sim/test_numerics.py` holds
# results of this number, and fails where they change and the number does not.
NUMERICS = 4
