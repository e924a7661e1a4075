"""What peft tunes when it is not told: the layers that it would choose in a Llama."""

import sys

OURS = {
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "output",
    "gate_proj": "expand",
    "up_proj": "expand",
    "down_proj": "contract",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
}
"""What the layers of a Llama are called here. Its MLP has two projections where ours has one."""


def tell_peft(model_type: str, like: str | None = None) -> None:
    """Enter this kind of model into peft's tables, if that is imported, beside the type it is like."""
    tables = vars(sys.modules.get("peft.utils.constants", object))
    for name, table in tables.items():
        if name.endswith("_MODULES_MAPPING") and like in table:
            table.setdefault(model_type, table[like])
        elif name.endswith("_MODULES_MAPPING") and like is None and "llama" in table:
            table.setdefault(model_type, sorted({OURS.get(layer, layer) for layer in table["llama"]}))
