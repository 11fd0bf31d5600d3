"""Which kernels a pass of ViT-B/32 spends its time in, and what would make it faster: nothing here is the product.

    python benchmarks/gpu_profile.py [--out FILE]

bf16, random weights, uint8 images on the device: forward passes as in scoring (batch 1024) and forward + backward as in
learning (batch 128), each as a CUDA graph, with one thing changed at a time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import machine
import torch
import where
from gpu_step import median_ms
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from zoo import Normalised


def graph(function: Callable[[], Any], stream: Any = None) -> Any:
    stream = stream or torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    made = torch.cuda.CUDAGraph()
    with torch.cuda.graph(made, stream=stream):
        function()
    return made


def patches_as_product(conv: nn.Conv2d) -> Callable[[Tensor], Tensor]:
    """A convolution whose kernel is its stride, as a matrix product."""
    p, q = conv.kernel_size

    def forward(x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        rows = x.view(n, c, h // p, p, w // q, q).permute(0, 2, 4, 1, 3, 5).reshape(n * (h // p) * (w // q), c * p * q)
        y = nn.functional.linear(rows, conv.weight.view(conv.out_channels, -1), conv.bias)
        return y.view(n, h // p, w // q, -1).permute(0, 3, 1, 2)

    return forward


@contextmanager
def changed(model: Any, what: str) -> Any:
    blocks = list(model.encoder.layers)
    with ExitStack() as stack:
        if what == "patches":
            vars(model.conv_proj)["forward"] = patches_as_product(model.conv_proj)
            stack.callback(vars(model.conv_proj).pop, "forward")
        if what == "patches+blocks compiled":
            stack.enter_context(changed(model, "patches"))
        if what == "benchmark":
            torch.backends.cudnn.benchmark = True
            stack.callback(setattr, torch.backends.cudnn, "benchmark", False)
        if what == "slow attention":
            torch.backends.mha.set_fastpath_enabled(False)
            stack.callback(torch.backends.mha.set_fastpath_enabled, True)
        kinds = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
                 "efficient": SDPBackend.EFFICIENT_ATTENTION}  # fmt: skip
        if what in kinds:
            stack.enter_context(sdpa_kernel(kinds[what]))
        if "blocks compiled" in what:
            for block in blocks:
                vars(block)["_compiled_call_impl"] = torch.compile(block._call_impl, dynamic=False)
                stack.callback(vars(block).pop, "_compiled_call_impl")
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("/tmp/gpu_profile.json"))
    parser.add_argument("--small", action="store_true", help="batches of 8 and 4, to try the script")
    args = parser.parse_args()
    torch.manual_seed(0)
    result: dict[str, Any] = {"what": __doc__.splitlines()[0], "machine": machine.describe("triton", "torchvision")}
    model = Normalised("vit_b_32").cuda().bfloat16().eval()
    large, small = (8, 4) if args.small else (1024, 128)
    x = torch.randint(0, 256, (2 * large, 3, 224, 224), dtype=torch.uint8, device="cuda")
    y = torch.randint(0, 1000, (2 * large,), device="cuda")

    def keep(name: str, value: Any) -> None:
        result[name] = value
        print(name, json.dumps(value), flush=True)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=2) + "\n")

    def forward(n: int, start: int = 0) -> Callable[[], Tensor]:
        images = x[start : start + n].clone()

        def once() -> Tensor:
            with torch.no_grad():
                return model(images)

        return once

    def learn(n: int) -> Callable[[], None]:
        images, labels = x[:n].clone(), y[:n].clone()

        def once() -> None:
            for p in model.parameters():
                p.grad = None
            nn.functional.cross_entropy(model(images).float(), labels).backward()

        return once

    for name, function in (("forward", forward(large)), ("learn", learn(small))):
        replay = graph(function).replay
        keep(f"{name}: kernels", where.kernels(replay))
        for row in result[f"{name}: kernels"]:
            print(f"{row['ms']:8.3f} ms {row['launches']:6.1f}  {row['kernel']}", flush=True)
    plain = forward(large)()
    variants = ("as it is", "patches", "benchmark", "slow attention", "cudnn", "flash", "efficient",
                "blocks compiled", "patches+blocks compiled")  # fmt: skip
    for what in variants:
        row: dict[str, Any] = {}
        for name, function in (("forward", forward(large)), ("learn", learn(small))):
            try:
                with changed(model, what):
                    began = time.perf_counter()
                    if name == "forward":
                        row["logits differ by"] = round(float((function() - plain).abs().max()), 5)
                    else:
                        function()
                    torch.cuda.synchronize()
                    row[f"{name}: first call s"] = round(time.perf_counter() - began, 2)
                    row[f"{name}: ms"] = round(median_ms(graph(function).replay, repeat=15), 3)
            except Exception as error:
                row[f"{name}: failed"] = str(error).splitlines()[0][:160]
        keep(what, row)
    for n in (large // 4, large // 2, 2 * large):
        keep(f"forward, batch {n}: images/s", round(n / median_ms(graph(forward(n)).replay, repeat=15) * 1000))
    # Two batches at once, each on a stream of its own.
    streams = [torch.cuda.Stream() for _ in range(2)]
    for n in (large // 4, large):
        pair = [graph(forward(n, i * n), stream) for i, stream in enumerate(streams)]

        def both(pair: list[Any] = pair) -> None:
            now = torch.cuda.current_stream()
            for one, stream in zip(pair, streams, strict=True):
                stream.wait_stream(now)
                with torch.cuda.stream(stream):
                    one.replay()
            for stream in streams:
                now.wait_stream(stream)

        keep(f"forward, two of {n} at once: images/s", round(2 * n / median_ms(both, repeat=15) * 1000))
    # The whole model compiled, last: it takes longest.
    compiled = torch.compile(model, dynamic=False)
    images, labels = x[:small].clone(), y[:small].clone()

    def whole() -> None:
        for p in model.parameters():
            p.grad = None
        nn.functional.cross_entropy(compiled(images).float(), labels).backward()

    began = time.perf_counter()
    whole()
    torch.cuda.synchronize()
    seconds = round(time.perf_counter() - began, 2)
    keep("learn: whole model compiled", {"first call s": seconds, "ms": round(median_ms(graph(whole).replay), 3)})
    print("kernels", json.dumps(where.kernels(graph(whole).replay, most=12)), flush=True)


if __name__ == "__main__":
    main()
