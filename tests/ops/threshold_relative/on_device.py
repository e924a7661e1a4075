"""An implementation that computes on another device than its tensors are on: every test runs there unchanged."""

from typing import Any

import torch
from torch import Tensor

from tra.ops.threshold_relative.call import Gradients, Implementation, Inputs, Options


class OnDevice:
    def __init__(self, implementation: Implementation, device: torch.device) -> None:
        self.implementation, self.device = implementation, device

    def about(self) -> str:
        return self.implementation.about()

    def refusal(self, inputs: Inputs, options: Options) -> str | None:
        tensors = (None if x is None else torch.empty_like(x, device="meta") for x in inputs)
        return self.implementation.refusal(Inputs(*tensors), options)

    def forward(self, inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
        out, state = self.implementation.forward(self._there(inputs), options)
        return out.to(inputs.query.device), state.to(inputs.query.device)

    def backward(self, grad_out: Tensor, inputs: Inputs, out: Tensor, row_state: Tensor, options: Options) -> Gradients:
        there = (x.to(self.device) for x in (grad_out, out, row_state))
        moved, *states = there
        gradients = self.implementation.backward(moved, self._there(inputs), *states, options)
        return tuple(x.to(grad_out.device) for x in gradients)  # type: ignore[return-value]

    def _there(self, inputs: Inputs) -> Any:
        return Inputs(*(None if x is None else x.to(self.device) for x in inputs))
