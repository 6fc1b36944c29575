"""Named configurations with a layer of each kind and no more."""

from dataclasses import replace

from quire.models.config.model import FULL, SLIDING
from quire.models.config.named import get_config
from quire.models.deepseek_v4.config import CSA, HASH_MOE, HCA, MOE

FEW = {
    "gemma3-tiny": {"layer_types": (SLIDING, SLIDING, FULL)},
    "gemma4-tiny": {"layer_types": (SLIDING, FULL, SLIDING)},
    "gemma4-e-tiny": {"layer_types": (SLIDING, SLIDING, FULL, SLIDING, FULL), "num_kv_shared_layers": 2},
    "gemma4-moe-tiny": {"layer_types": (SLIDING, FULL, SLIDING)},
    "deepseek-v4-tiny": {"layer_types": (SLIDING, CSA, HCA), "mlp_layer_types": (HASH_MOE, MOE, MOE), "num_mtp_layers": 0},
}  # fmt: skip


def few(name):
    """The configuration ``name`` with a layer of each kind, where that is known."""
    return replace(get_config(name), **FEW.get(name, {}))
