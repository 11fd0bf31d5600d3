"""Tensor names and shapes of the models the benchmarks speak of, so that none has to be downloaded."""

from __future__ import annotations


def vit_b_32() -> dict[str, tuple[int, ...]]:
    """torchvision's ViT-B/32: 152 tensors, 88.2M parameters."""
    width, hidden = 768, 3072
    shapes: dict[str, tuple[int, ...]] = {
        "class_token": (1, 1, width),
        "conv_proj.weight": (width, 3, 32, 32),
        "conv_proj.bias": (width,),
        "encoder.pos_embedding": (1, 50, width),
    }
    for i in range(12):
        p = f"encoder.layers.encoder_layer_{i}."
        shapes |= {
            p + "ln_1.weight": (width,),
            p + "ln_1.bias": (width,),
            p + "self_attention.in_proj_weight": (3 * width, width),
            p + "self_attention.in_proj_bias": (3 * width,),
            p + "self_attention.out_proj.weight": (width, width),
            p + "self_attention.out_proj.bias": (width,),
            p + "ln_2.weight": (width,),
            p + "ln_2.bias": (width,),
            p + "mlp.0.weight": (hidden, width),
            p + "mlp.0.bias": (hidden,),
            p + "mlp.3.weight": (width, hidden),
            p + "mlp.3.bias": (width,),
        }
    return shapes | {
        "encoder.ln.weight": (width,),
        "encoder.ln.bias": (width,),
        "heads.head.weight": (1000, width),
        "heads.head.bias": (1000,),
    }
