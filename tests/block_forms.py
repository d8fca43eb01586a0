"""Block heads of every form that the kernels of a GPU run."""

import torch
from tiny import block_head

FORMS = {
    "own": {},
    "bidirectional": {"causal": False},
    "public": {"starts": False, "causal": False, "qk_norm": True, "sequential": "vanilla", "mask_token": 3},
    "gated": {"sequential": "gated", "attention_bias": True},
    "bare": {"rank": 0, "depth": 1},
    "all its own": {"own_sequential": True, "own_output": True, "own_embedding": True},
}
CUT = {"public", "all its own"}  # they write every other token


def block_forms(model, form):
    torch.manual_seed(7)
    ids = torch.arange(0, model.vocab_size, 2) if form in CUT else None
    return block_head(model, ids, **FORMS[form]).requires_grad_(False).to(model.device)
