"""Everything that training changes, on one device, and the step that changes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from prism_server.demo_model.training.batches import Batch
from prism_server.demo_model.training.network import Network
from prism_server.demo_model.training.objective import answer_loss, cell_loss, initial_heads
from prism_server.model.config import ModelConfig
from prism_server.model.loader import Shape, Tensors

WEIGHT_DECAY = 0.03
BETAS = (0.9, 0.98)
MAX_GRADIENT_NORM = 1.0
INITIAL_DEVIATION = 0.02
WARM_UPS = 2
"""Calls before a capture, in which libraries set themselves up."""


def initial_weights(shapes: Mapping[str, Shape], device: torch.device, generator: torch.Generator) -> Tensors:
    """Float32 weights to train from: normal matrices, norms 1, biases 0."""
    weights = {}
    for name, shape in shapes.items():
        if len(shape) > 1:
            weight = torch.randn(shape, generator=generator) * INITIAL_DEVIATION
        else:
            weight = torch.zeros(shape) if name.endswith(".bias") else torch.ones(shape)
        weights[name] = weight.to(device)
    return weights


class Replay:
    """A function without arguments over tensors at fixed addresses. On a GPU captured once as a CUDA graph.

    It is called `WARM_UPS` times before the capture. Graphs of one `pool` share their memory, so one runs at a time.
    """

    def __init__(self, function: Callable[[], None], device: torch.device, pool: Any) -> None:
        self._graph: torch.cuda.CUDAGraph | None = None
        self._function = function
        if device.type != "cuda":
            return
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                function()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: the thread that pins the loader's batches goes on calling CUDA
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            function()
        self._graph = graph

    def __call__(self) -> None:
        if self._graph is None:
            self._function()
        else:
            self._graph.replay()


class Learner:
    """Weights, auxiliary heads and optimiser. `take_step` is one update from one batch.

    On a GPU a step is two graph replays: loss and gradients, captured when a layout first comes, and the update.
    """

    def __init__(self, config: ModelConfig, weights: Tensors, dtype: torch.dtype) -> None:
        """`weights`: float32, by released name, on the device to train on. `dtype`: that of the products."""
        self.config = config
        self.weights = weights
        self.device = next(iter(weights.values())).device
        self.heads = initial_heads(config.text.hidden_size, self.device)
        self.network = Network(config, weights, dtype)
        self._parameters = [*self.weights.values(), *self.heads.values()]
        self._gradients = [torch.zeros_like(parameter) for parameter in self._parameters]
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.requires_grad_(True).grad = gradient
        self._lr = torch.zeros((), device=self.device)
        self._aux_weight = torch.zeros((), device=self.device)
        self.losses = torch.zeros(2, device=self.device)
        """Of the last batch: the answers' and the auxiliary one."""
        self._optimiser = self._make_optimiser()
        self._pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        self._layouts: dict[str, tuple[Batch, Replay]] = {}
        self._optimiser.step()  # with rate and gradients 0 it only makes the averages, of zeros
        self._update = Replay(self._apply_gradients, self.device, self._pool)
        self.set_num_steps(0)

    def take_step(self, batch: Batch, learning_rate: float, aux_weight: float) -> None:
        """Does not wait for the GPU."""
        self._lr.fill_(learning_rate)
        self._aux_weight.fill_(aux_weight)
        if (prepared := self._layouts.get(batch.layout.name)) is None:
            inputs = batch.map(lambda tensor: tensor.to(self.device))
            prepared = inputs, Replay(lambda: self._find_gradients(inputs), self.device, self._pool)
            self._layouts[batch.layout.name] = prepared
        inputs, gradients = prepared
        inputs.fill(batch)
        gradients()
        self._update()

    def averages(self) -> tuple[Tensors, Tensors]:
        """The optimiser's averages of the gradients and of their squares, by the parameters' names; not copies."""
        state = self._optimiser.state
        named = self.named_parameters()
        return (
            {name: state[parameter]["exp_avg"] for name, parameter in named.items()},
            {name: state[parameter]["exp_avg_sq"] for name, parameter in named.items()},
        )

    def named_parameters(self) -> Tensors:
        return {**self.weights, **{f"heads.{name}": head for name, head in self.heads.items()}}

    def set_num_steps(self, num_steps: int) -> None:
        """Tells the optimiser how many steps its averages come from."""
        for state in self._optimiser.state.values():
            state["step"].fill_(num_steps)

    def _make_optimiser(self) -> torch.optim.AdamW:
        matrices = [parameter for parameter in self._parameters if parameter.ndim > 1]
        vectors = [parameter for parameter in self._parameters if parameter.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
        on_gpu = self.device.type == "cuda"
        return torch.optim.AdamW(groups, lr=self._lr, betas=BETAS, fused=True, capturable=on_gpu)

    def _find_gradients(self, batch: Batch) -> None:
        torch._foreach_zero_(self._gradients)
        output = self.network(batch)
        answers, cells = answer_loss(batch, output), cell_loss(batch, output, self.heads)
        torch.autograd.backward(answers + self._aux_weight * cells)
        self.losses.copy_(torch.stack((answers.detach(), cells.detach())))

    def _apply_gradients(self) -> None:
        # Apart, for the heads' gradients can be many times the model's and would shrink them.
        torch.nn.utils.clip_grad_norm_(list(self.weights.values()), MAX_GRADIENT_NORM)
        torch.nn.utils.clip_grad_norm_(list(self.heads.values()), MAX_GRADIENT_NORM)
        self._optimiser.step()
