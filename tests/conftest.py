import helpers  # noqa: F401  (before any test module imports triton: in CPU mode kernels are then interpreted)
