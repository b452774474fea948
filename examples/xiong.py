"""The model that Xiong et al. (arXiv 2002.04745) analyse: uniform attention, ReLU FFN, Xavier weights.

Query and key are 0, so that attention is the mean over all tokens; LayerNorm with gain 1 and bias 0."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class UniformAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.v = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.v(x).mean(-2, keepdim=True).expand_as(x)
        return out


def feed_forward(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, width, bias=False), nn.ReLU(), nn.Linear(width, width, bias=False)
    )


class Block(nn.Module):
    def __init__(self, width: int, *, post: bool) -> None:
        super().__init__()
        self.post = post
        self.attention_norm = nn.LayerNorm(width)
        self.attention = UniformAttention(width)
        self.ffn_norm = nn.LayerNorm(width)
        self.ffn = feed_forward(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before_last_norm(x)
        out: Tensor = self.ffn_norm(x) if self.post else x
        return out

    def before_last_norm(self, x: Tensor) -> Tensor:
        """Post-LN: what the block's last norm sees. Pre-LN: what the block puts out."""
        if self.post:
            x = self.attention_norm(x + self.attention(x))
            out: Tensor = x + self.ffn(x)
        else:
            x = x + self.attention(self.attention_norm(x))
            out = x + self.ffn(self.ffn_norm(x))
        return out


class Encoder(nn.Module):
    """(batch, token, width) to the same; Pre-LN ends with a norm."""

    def __init__(self, width: int, layers: int, *, post: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, post=post) for _ in range(layers))
        self.norm = nn.Identity() if post else nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.norm(x)
        return out


def last_gradient(width: int, layers: int, seed: int, *, post: bool) -> float:
    """Frobenius norm of the loss's gradient in the last FFN's second matrix, before any training.

    The loss is that of 512 tokens with random labels, of as many classes as channels.
    """
    torch.manual_seed(seed)
    model = Encoder(width, layers, post=post)
    head = torch.randn(width, width) / width**0.5
    logits = model(torch.randn(32, 16, width)) @ head
    labels = torch.randint(width, (32 * 16,))
    functional.cross_entropy(logits.flatten(0, 1), labels).backward()
    gradient = model.blocks[-1].get_submodule("ffn.2").get_parameter("weight").grad
    assert gradient is not None
    return float(gradient.norm())
