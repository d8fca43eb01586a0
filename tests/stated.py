"""What vLLM cannot do, in the words of the server: tests of the faces that are refused there, and how."""

from __future__ import annotations

from typing import Any, NamedTuple

PLAIN, DRAFTING = "vllm", "vllm-drafting"  # vLLM without speculation, and with a draft model
BOTH = (PLAIN, DRAFTING)

AS_LOADED = "vLLM speculates as it was loaded"
OTHER_WORDS = "vLLM has no drafter"
NO_PREDICTION = "vLLM has no drafter that reads one"
SAMPLING = "sampling while it speculates on a CPU: vLLM loses the temperature"
MIN_P = "min_p: vLLM does not apply it while it speculates"
BIAS = "logit_bias: vLLM does not apply it while it speculates"
TYPICAL = "typical_p: vLLM has no such option"


class Refusal(NamedTuple):
    test: str
    case: str  # a part of the parametrised name; "": all of them
    on: tuple[str, ...]
    status: int
    says: str


STATED = [
    # OpenAI
    Refusal("test_a_seed_gives_the_same_text_whoever_drafts", "as launched", (DRAFTING,), 400, SAMPLING),
    Refusal("test_a_seed_gives_the_same_text_whoever_drafts", "off", (DRAFTING,), 400, SAMPLING),
    Refusal("test_a_seed_gives_the_same_text_whoever_drafts", "ngram", (PLAIN,), 400, AS_LOADED),
    Refusal("test_a_seed_gives_the_same_text_whoever_drafts", "ngram", (DRAFTING,), 400, SAMPLING),
    Refusal("test_a_seed_gives_the_same_text_whoever_drafts", "layer_skip", BOTH, 400, OTHER_WORDS),
    Refusal("test_metrics_tell_what_was_drafted", "", (PLAIN,), 400, NO_PREDICTION),
    Refusal("test_metrics_tell_what_was_drafted", "", (DRAFTING,), 400, AS_LOADED),
    Refusal("test_prediction_counts_are_true", "", BOTH, 400, NO_PREDICTION),
    Refusal("test_n_samples_and_stops", "", (DRAFTING,), 400, SAMPLING),
    Refusal("test_a_bias_reaches_the_law", "", (DRAFTING,), 400, BIAS),
    Refusal("test_many_options_reach_the_law", "", (DRAFTING,), 400, MIN_P),
    Refusal("test_tokens_tell_who_wrote_them", "", BOTH, 400, OTHER_WORDS),
    Refusal("test_an_allowed_folder", "", BOTH, 400, AS_LOADED),
    Refusal("test_with_the_reason", "outside the vocabulary", (DRAFTING,), 400, BIAS),
    Refusal("test_with_the_reason", "teapot", BOTH, 400, OTHER_WORDS),
    # LoRAX: in its own shape; what a body asks for is a 422 there
    Refusal("test_sampling_is_ours_and_its_seed_gives_it_again", "", (DRAFTING,), 422, SAMPLING),
    Refusal("test_typical_sampling_is_ours", "", BOTH, 422, TYPICAL),
    Refusal("test_the_best_of_several", "", (DRAFTING,), 422, SAMPLING),
    Refusal("test_the_end_token_ends_the_text_unless_ignored", "", (DRAFTING,), 422, SAMPLING),
    # Xinference
    Refusal("test_a_generate_config_is_honoured", "gamma", (DRAFTING,), 400, AS_LOADED),
    Refusal("test_a_generate_config_is_honoured", "length", (DRAFTING,), 400, AS_LOADED),
    Refusal("test_a_generate_config_is_honoured", "sampled", (DRAFTING,), 400, SAMPLING),
    Refusal("test_a_launch_that_cannot_be_says_why", "unknown drafter 'nobody'", (DRAFTING,), 400, OTHER_WORDS),
    Refusal("test_a_launch_that_cannot_be_says_why", "tokenizer", (DRAFTING,), 400, "has no option 'tokenizer'"),
]


def refusal(item: Any) -> Refusal | None:
    """What is stated for a test where it runs; None: it passes there."""
    on = getattr(item, "callspec", None) and item.callspec.params.get("on")
    found = [each for each in STATED if each.test == item.originalname and each.case in item.name and on in each.on]
    return found[0] if found else None
