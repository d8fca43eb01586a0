"""Forms of EAGLE heads, and such a head at work on some texts."""

import torch

from outrider.models.base import Feed

FORMS = {
    "eagle-3": {},
    "cut, two layers, normed output": dict(ids=torch.arange(0, 40, 2), depth=2, norm_output=True),
    "as its authors have it": dict(norm_inputs=False, norm_residual=False),
    "normed together": dict(norm_inputs=False, norm_joined=True),
    "two blocks": dict(layers=(0, 2)),
    "eagle-1": dict(layers=()),
    "eagle-1 with a bias": dict(layers=(), fc_bias=True),
    "all its own": dict(own_output=True, own_embedding=True, attention_bias=True),
}
EAGLE_1 = [form for form, options in FORMS.items() if options.get("layers") == ()]

TEXTS = [torch.randint(40, (18,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(3)]
ENDS = (9, 12, 5)  # where a draft of each text begins
STEPS = 4


def at_work(runner, head, target, texts=TEXTS, ends=ENDS):
    """What the runner says, beginning a draft at each text's end and following the text: [b, vocabulary] per step."""
    ids, layers = range(len(texts)), head.config.layers or (target.num_layers - 1,)
    hidden = [output.hidden.clone() for output in target.forward([Feed(-1 - i, texts[i]) for i in ids], layers)]
    for i in ids:
        target.free(-1 - i)
    for part in (slice(0, 3), slice(3, None)):
        tokens = [texts[i][1 : ends[i] + 2][part] for i in ids]
        rows = runner.extend(ids, tokens, torch.cat([hidden[i][: ends[i] + 1][part] for i in ids]))
    said = [rows.logits]
    for step in range(STEPS - 1):
        tokens = torch.tensor([texts[i][ends[i] + 2 + step] for i in ids])
        rows = runner.step(ids, tokens, rows.states, torch.arange(step).expand(len(texts), -1))
        said.append(rows.logits)
    return said
