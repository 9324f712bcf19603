"""The registered blocks, one kind a file. Importing this package registers them."""

from tfm_blocks.blocks import attention, embedding, feedforward, norm, position, restricted, unembed

__all__ = ["attention", "embedding", "feedforward", "norm", "position", "restricted", "unembed"]
