"""An implementation that computes on another device than its tensors are on: every test runs there unchanged."""

from typing import Any

import torch
from torch import Tensor

from tra.ops.threshold_relative.call import Gradients, Implementation, Inputs, Options, Result


class OnDevice:
    def __init__(self, implementation: Implementation, device: torch.device) -> None:
        self.implementation, self.device = implementation, device
        self.RESIDUAL = getattr(implementation, "RESIDUAL", ())

    def about(self) -> str:
        return self.implementation.about()

    def refusal(self, inputs: Inputs, options: Options) -> str | None:
        tensors = (None if x is None else torch.empty_like(x, device="meta") for x in inputs)
        return self.implementation.refusal(Inputs(*tensors), options)

    def forward(self, inputs: Inputs, options: Options, training: bool) -> Result:
        result = self.implementation.forward(self._there(inputs), options, training)
        return Result(*(None if x is None else x.to(inputs.query.device) for x in result))  # type: ignore[arg-type]

    def backward(self, grad_out: Tensor, inputs: Inputs, result: Result, options: Options) -> Gradients:
        there: Any = Result(*(None if x is None else x.to(self.device) for x in result))  # type: ignore[arg-type]
        gradients = self.implementation.backward(grad_out.to(self.device), self._there(inputs), there, options)
        return Gradients(*(None if x is None else x.to(grad_out.device) for x in gradients))  # type: ignore[arg-type]

    def _there(self, inputs: Inputs) -> Any:
        return Inputs(*(None if x is None else x.to(self.device) for x in inputs))
