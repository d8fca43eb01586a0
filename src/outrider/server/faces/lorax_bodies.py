"""Bodies of LoRAX's API, and what they mean to the engine."""

from __future__ import annotations

import random
from typing import Annotated, Any, Literal

from pydantic import Field

from outrider.core.adapter import MOST, PRUNING, Majority
from outrider.core.params import SamplingParams
from outrider.core.request import Request
from outrider.server.errors import ServerError
from outrider.server.faces.adapters import ChosenAdapter
from outrider.server.faces.fields import FilledStop, FilledText, Name, Repetition, StrictBody, Temperature
from outrider.server.faces.structured import LoraxResponseFormat, of_format

MAX_BEST_OF = 16  # samples of which the best is shown
MAX_STOP = 64  # stop strings
MANY = 2**31 - 1  # tokens: as many as the context holds
Positive = Annotated[int, Field(gt=0, le=MANY)]
Share = Annotated[float, Field(gt=0, lt=1)]


class Unprocessable(ServerError):
    """LoRAX's status for a request that cannot be."""

    status, kind = 422, "invalid_request_error"


class MergedField(StrictBody):
    """Several adapters as one, as PEFT mixes them. Their client always sends a density, also where none is used."""

    ids: list[Name] = Field(min_length=1, max_length=MOST)
    weights: list[float] = Field(default_factory=list, max_length=MOST)
    merge_strategy: Literal["linear", "ties", "dare_linear", "dare_ties"] | None = None
    density: Annotated[float, Field(ge=0, le=1)] | None = None
    majority_sign_method: Majority | None = None

    def how(self) -> dict[str, Any]:
        """The fields of an AdapterMix, beside the names."""
        strategy = self.merge_strategy or "linear"
        return {
            "weights": tuple(self.weights),
            "strategy": strategy,
            "density": self.density if strategy in PRUNING else None,
            "majority_sign_method": self.majority_sign_method or "total",
        }


class LoraxParameters(StrictBody):
    adapter_id: Name | None = None
    adapter_source: Literal["hub", "local", "s3", "pbase"] | None = None
    merged_adapters: MergedField | None = None
    api_token: Name | None = None
    best_of: Annotated[int, Field(gt=0, le=MAX_BEST_OF)] | None = None
    temperature: Temperature | None = None
    repetition_penalty: Repetition | None = None
    top_k: Positive | None = None
    top_p: Share | None = None
    typical_p: Share | None = None
    do_sample: bool = False
    max_new_tokens: Positive | None = None
    ignore_eos_token: bool = False
    return_full_text: bool | None = None
    stop: list[FilledStop] = Field(default_factory=list, max_length=MAX_STOP)
    truncate: Positive | None = None
    watermark: bool = False
    details: bool = False
    decoder_input_details: bool = False
    return_k_alternatives: Annotated[int, Field(gt=0, le=20)] | None = None
    apply_chat_template: bool = False
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    response_format: LoraxResponseFormat | None = None

    @property
    def samples(self) -> bool:
        """Whether anything asks for sampling, as LoRAX has it: a temperature of 1 alone does not, and 0 forbids it."""
        warped = self.temperature not in (None, 0.0, 1.0) or self.top_k or self.top_p or self.typical_p
        return bool(self.do_sample or warped) and self.temperature != 0.0

    @property
    def count(self) -> int:
        return self.best_of or 1

    @property
    def wants_details(self) -> bool:
        return self.details or self.decoder_input_details

    def chosen_seed(self) -> int | None:
        """The given seed, or a random one that the response names, so that it gives the text again. None for several
        samples: each has random numbers of its own, and no seed would give one of them again."""
        if self.seed is not None or not self.samples or self.count > 1:
            return self.seed
        return random.getrandbits(63)

    def refuse(self) -> None:
        """What LoRAX has and we have not, and what cannot go together."""
        for given, reason in (
            (
                self.merged_adapters is not None and self.adapter_id is not None,
                "adapter_id and merged_adapters exclude each other; leave out one of them",
            ),
            (self.api_token, "api_token is not used: the server asks the hub under its own login; leave it out"),
            (self.watermark, "watermark would change the model's own law, and it is not built in; leave it out"),
            (self.count > 1 and not self.samples, "best_of above 1 needs sampling: set do_sample or a temperature"),
            (self.count > 1 and self.seed is not None, "best_of above 1 and a seed exclude each other"),
        ):
            if given:
                raise Unprocessable(reason)

    def refuse_for_streams(self) -> None:
        if self.count > 1:
            raise Unprocessable("best_of above 1 needs all of the text first, so it cannot be streamed; use /generate")
        if self.decoder_input_details:
            raise Unprocessable("decoder_input_details is not for streams; use /generate")

    def params(self, seed: int | None, stream: bool) -> SamplingParams:
        shown = stream or self.wants_details or self.count > 1
        constraint = of_format(self.response_format)
        return SamplingParams(
            max_tokens=self.max_new_tokens or MANY,
            temperature=0.0 if not self.samples else 1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k or 0,
            top_p=self.top_p or 1.0,
            typical_p=self.typical_p or 1.0,
            seed=seed,
            repetition_penalty=self.repetition_penalty or 1.0,
            stop=self.stop,
            ignore_eos=self.ignore_eos_token,
            logprobs=(self.return_k_alternatives or 0) if shown else None,
            n=self.count,
            **({} if constraint is None else constraint.params),
        )


class LoraxBody(StrictBody):
    inputs: FilledText
    parameters: LoraxParameters | None = None

    @property
    def asked(self) -> LoraxParameters:
        return self.parameters or LoraxParameters()

    def request(self, seed: int | None, chosen: ChosenAdapter, stream: bool) -> Request:
        params = self.asked.params(seed, stream)
        message = [{"role": "user", "content": self.inputs}] if self.asked.apply_chat_template else None
        prompt = self.inputs if message is None else None
        return Request(prompt, message, params, chosen.draft, stream=stream, adapter=chosen.adapter)


class LoraxStreamableBody(LoraxBody):
    stream: bool = False
