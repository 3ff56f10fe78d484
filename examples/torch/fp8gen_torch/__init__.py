"""FP8 linear layers for PyTorch over the C ABI of libfp8; see README.md beside this package."""
from .abi import Fp8Error
from .layers import Recipe
from .linear import Fp8Linear, State, fp8_linear, state_of, weights_changed

__all__ = ["Fp8Error", "Fp8Linear", "Recipe", "State", "fp8_linear", "state_of", "weights_changed"]
