"""Mix-LN (Li et al., arXiv 2412.13795): the first quarter of the blocks are Post-LN,
norm(x + F(x)), which holds their output at variance 1; the others are Pre-LN."""

from examples.language_model import LanguageModel, Size
from examples.post_ln import PostLNBlock
from examples.pre_ln import PreLNBlock

ALPHA = 0.25


def build(size: Size) -> LanguageModel:
    post = int(ALPHA * size.blocks)
    return LanguageModel(
        size, (PostLNBlock(size) if i < post else PreLNBlock(size) for i in range(size.blocks))
    )
