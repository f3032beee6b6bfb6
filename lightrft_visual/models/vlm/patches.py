"""Patches that are cut already need a product, not a convolution."""

from __future__ import annotations

import torch
import torch.nn as nn

T = torch.Tensor


class PatchConv3d(nn.Conv3d):
    """The patch embedding of a Qwen-VL tower: a convolution over patches of exactly its kernel's size.

    Each patch then gives one output, a product with the kernel, which PyTorch's convolution computes much more slowly.
    Parameters, names and hooks are those of `nn.Conv3d`; inputs of other sizes are convolved as before.
    """

    @classmethod
    def adopt(cls, convolution: nn.Module) -> None:
        """Turn a plain nn.Conv3d into a PatchConv3d in place; anything else (an adapter around one) stays as it is."""
        if type(convolution) is nn.Conv3d and convolution.groups == 1 and convolution.padding == (0, 0, 0):
            convolution.__class__ = cls

    def forward(self, patches: T) -> T:
        """(N, channels, frames, height, width) to (N, features, 1, 1, 1) where each is as large as the kernel."""
        if patches.shape[2:] != self.weight.shape[2:]:
            return super().forward(patches)
        features = patches.flatten(1) @ self.weight.flatten(1).t()
        if self.bias is not None:
            features = features + self.bias
        return features[..., None, None, None]
