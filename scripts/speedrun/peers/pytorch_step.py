#!/usr/bin/env python3
"""A peer: the training step of the same models in PyTorch, on one batch that is repeated on the GPU, or else the CPU.

On a GPU with TF32, as in TensorFlow, and with cuDNN's fastest convolutions. The whitening's bias is frozen, as it is in
most of a run.
Source of speednet94 and its optimizers: K. Jordan, arXiv 2404.00498, and the public 2025 CIFAR-10 record.
"""

import os
import time
from collections.abc import Callable, Iterator

import numpy as np
import protocol

try:
    import torch
except ImportError as error:
    raise SystemExit(
        "PyTorch is missing; type: pip install 'torch>=2.6,<3', or give --peer_python of a Python that has it"
    ) from error
from torch import nn
from torch.nn import functional as F


class Norm(nn.BatchNorm2d):
    """Batch norm without a scale, with its moments in float32 in any precision."""

    def __init__(self, channels: int):
        super().__init__(channels, eps=1e-5, momentum=1 - 0.5566)
        self.weight.requires_grad_(False)


class Group(nn.Module):
    """conv, pool, norm, SiLU, conv, norm, SiLU; halves height and width."""

    def __init__(self, channels_in: int, channels: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1, self.norm2 = Norm(channels), Norm(channels)
        for conv in (self.conv1, self.conv2):
            nn.init.dirac_(conv.weight[: conv.in_channels])

    def forward(self, x):
        x = F.silu(self.norm1(F.max_pool2d(self.conv1(x), 2)))
        return F.silu(self.norm2(self.conv2(x)))


class Speednet94(nn.Module):
    """[B, 3, 32, 32] -> [B, 10]: frozen whitening, three groups, a global maximum, a scaled head."""

    def __init__(self, images: torch.Tensor):
        super().__init__()
        self.whitening = nn.Conv2d(3, 24, 2).requires_grad_(False)
        self.whitening.weight.copy_(whitening(images))
        self.groups = nn.Sequential(*(Group(a, b) for a, b in ((24, 64), (64, 256), (256, 256))))
        self.head = nn.Linear(256, 10, bias=False)

    def forward(self, x):
        x = F.max_pool2d(self.groups(F.gelu(self.whitening(x))), 3)
        return self.head(x.flatten(1)) / 256


def whitening(images: torch.Tensor, epsilon: float = 5e-4) -> torch.Tensor:
    """Compute [24, 3, 2, 2] filters: principal components of 2x2 patches over their deviations, with both signs."""
    patches = F.unfold(images[:960], 2).transpose(1, 2).reshape(-1, 12).double()
    values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
    filters = (vectors / (values + epsilon).sqrt()).T.reshape(12, 3, 2, 2).float()
    return torch.cat([filters, -filters])


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut with a stride of two that pads new channels with zeros."""

    def __init__(self, channels_in: int, channels: int):
        super().__init__()
        self.stride = 1 if channels_in == channels else 2
        self.missing = channels - channels_in
        self.conv1 = nn.Conv2d(channels_in, channels, 3, self.stride, 1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x):
        shortcut = x
        if self.missing:
            sides = [self.missing // 2, self.missing - self.missing // 2]
            shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], [0, 0, 0, 0, *sides])
        x = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(x + shortcut)


class Resnet20(nn.Module):
    """[B, 3, 32, 32] -> [B, 10]: He et al., arXiv 1512.03385, section 4.2."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        widths = [16] * 4 + [32] * 3 + [64] * 3
        self.blocks = nn.Sequential(*map(Block, widths, widths[1:]))
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        return self.head(self.blocks(F.relu(self.norm(self.conv(x)))).mean((2, 3)))


class Muon(torch.optim.Optimizer):
    """Nesterov momentum with a direction made nearly orthogonal by three Newton-Schulz steps."""

    def __init__(self, kernels, orthogonal: Callable, lr: float = 0.2, momentum: float = 0.655):
        super().__init__(kernels, {"lr": lr, "momentum": momentum})
        self.orthogonal = orthogonal

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for kernel in group["params"]:
                buffer = self.state[kernel].setdefault("momentum", torch.zeros_like(kernel))
                buffer.mul_(group["momentum"]).add_(kernel.grad)
                direction = kernel.grad.add(buffer, alpha=group["momentum"])
                kernel.mul_(len(kernel) ** 0.5 / kernel.norm())
                update = self.orthogonal(direction.reshape(len(kernel), -1))
                kernel.add_(update.view_as(kernel), alpha=-group["lr"])


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix with the same singular vectors and singular values near 1."""
    x = matrix / (matrix.norm() + 1e-7)
    tall = len(x) > x.shape[1]
    x = x.T if tall else x
    for _ in range(3):
        gram = x @ x.T
        x = 3.4576 * x + (-4.7391 * gram + 2.0843 * gram @ gram) @ x
    return x.T if tall else x


def make_step(model: nn.Module, images: np.ndarray, labels: np.ndarray, args) -> Callable[[int], Iterator[float]]:
    """Return a function (steps) -> seconds of each step: forward, loss, backward, update."""
    bfloat16 = args.precision == "bfloat16"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")
    model = model.to(device, memory_format=torch.channels_last)
    if bfloat16:  # weights too, as the records have them in half precision; norms stay float32
        model.to(torch.bfloat16)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.float()
    kernels = [p for p in model.parameters() if p.requires_grad and p.ndim == 4]
    if isinstance(model, Speednet94):
        rest = [p for p in model.parameters() if p.requires_grad and p.ndim != 4]
        turn = torch.compile(orthogonal, dynamic=False) if args.compile else orthogonal
        optimizers = [Muon(kernels, turn), torch.optim.SGD(rest, 0.01, 0.825, nesterov=True, fused=True)]
    else:
        optimizers = [torch.optim.SGD(model.parameters(), 0.01, 0.9, weight_decay=2e-4, fused=True)]
    batch = torch.from_numpy(images).permute(0, 3, 1, 2)  # the NHWC bytes as they are, which is channels_last
    batch = batch.to(device, torch.bfloat16 if bfloat16 else torch.float32)
    targets = torch.from_numpy(labels).to(device)
    forward = torch.compile(model) if args.compile else model

    def run(steps: int) -> Iterator[float]:
        for _ in range(steps):
            start = time.perf_counter()
            loss = F.cross_entropy(forward(batch).float(), targets, label_smoothing=0.09)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad(set_to_none=True)
            loss.item()
            yield time.perf_counter() - start

    return run


def main() -> None:
    """Serve the steps of PyTorch; needs PyTorch and NumPy."""
    parser = protocol.make_parser(__doc__)
    parser.add_argument("--compile", action="store_true", help="compile the net and Muon's direction by torch.compile")
    args = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    torch.manual_seed(0)
    data = protocol.load(args.data)
    images, labels = data["images"][: args.batch_size], data["labels"][: args.batch_size]
    if args.model == "resnet20":
        model = Resnet20()
    else:
        with torch.no_grad():
            model = Speednet94(torch.from_numpy(images).permute(0, 3, 1, 2))
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    protocol.serve(make_step(model, images, labels, args), trained)


if __name__ == "__main__":
    main()
