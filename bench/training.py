"""A training whose state is worth saving: a language model of any size, with AdamW, on a CPU or a GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

_cuda: Any = torch.cuda


class Shape(NamedTuple):
    width: int
    layers: int
    vocabulary: int
    batch: int
    sequence: int


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 128)
        self.norm, self.other_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.query_key_value(self.norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        down: torch.Tensor = self.down(functional.gelu(self.up(self.other_norm(x))))
        return x + down


class Decoder(nn.Module):
    """A language model of the usual shape; the output shares its weights with the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.layers = nn.Sequential(*(Layer(shape.width) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = functional.linear(self.norm(self.layers(self.embedding(tokens))), self.embedding.weight)
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Training:
    def __init__(self, shape: Shape, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.device = torch.device(device)
        self.model = Decoder(shape).to(self.device, dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.vocabulary = shape.vocabulary
        self.feed(shape.batch, shape.sequence)
        self.forward_backward()
        self.optimizer.step()  # makes the moments
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}

    def feed(self, batch: int, sequence: int) -> None:
        self.tokens = torch.randint(self.vocabulary, (batch, sequence), device=self.device)

    def forward_backward(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)  # no memory to be touched anew: steadier figures
        self.model(self.tokens).backward()

    def state_dict(self) -> dict[str, Any]:
        """For torch's savers. One of them cannot stage an OrderedDict in every version (2.11)."""
        return {"model": dict(self.model.state_dict()), "optimizer": self.optimizer.state_dict()}

    def tensors(self) -> list[torch.Tensor]:
        moments = [value for one in self.optimizer.state.values() for value in one.values()]
        return [*self.model.parameters(), *moments]

    @property
    def size_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())

    def __str__(self) -> str:
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        return f"{parameters / 1e6:.0f} M parameters, {self.size_bytes / 1e9:.2f} GB in {len(self.tensors())} tensors"

    def finish(self) -> None:
        if self.device.type == "cuda":
            _cuda.synchronize()
