"""FP8 linear layers for PyTorch over the C ABI of libfp8; see README.md beside this package."""

from .abi import Fp8Error
from .layers import Recipe, prepare
from .linear import Fp8Linear, fp8_linear
from .states import State, advance_scales, state_of, weights_changed
from .weight_parallel import Communicator, ShardState, precompute_amax, weight_parallel_linear
from .wrapper import Fp8Mode, Fp8Weight, GatheredWeight, fp8_weights, precompute_scales

__all__ = [
    "Communicator",
    "Fp8Error",
    "Fp8Linear",
    "Fp8Mode",
    "Fp8Weight",
    "GatheredWeight",
    "Recipe",
    "ShardState",
    "State",
    "advance_scales",
    "fp8_linear",
    "fp8_weights",
    "precompute_amax",
    "precompute_scales",
    "prepare",
    "state_of",
    "weight_parallel_linear",
    "weights_changed",
]
