"""TRL's GRPOTrainer with rollouts from the SGLang engines that refitd updates.

>>> from refitd_client.trainers.trl_rollouts import RefitRollouts
>>> refit = RefitRollouts("/shared/weights", "grpo/trial", "http://127.0.0.1:8700")
>>> trainer = GRPOTrainer(..., rollout_func=refit, callbacks=[refit])

TRL calls `rollout_func` for completions. Before the first ones of a step the weights of that step are published, and
the call waits until engines serve them. Then each rank sends its prompts to the engines' `/generate`, in equal shares
to those that serve the version. A request that fails, is aborted, or is answered from other weights is sent again, to
the engines that serve the version then.

For a server of vLLM there is `refitd_client.trainers.trl`.
"""

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, cast

import httpx
import msgspec
from accelerate.utils import gather_object  # pyright: ignore[reportMissingTypeStubs]
from transformers import TrainerControl, TrainerState, TrainingArguments
from trl.data_utils import is_conversational

from refitd_client.contract.decoding import from_json
from refitd_client.contract.naming import label_of
from refitd_client.contract.states import EngineState
from refitd_client.errors import InvalidWeightsError, PublishError, RefitError, ServiceError
from refitd_client.http.client import RefitClient
from refitd_client.http.connection import IDENTITY, BoundedTransport, body_of, ending_within, no_certificates
from refitd_client.trainers.transformers import RefitCallback

_ASK_PAUSE = 0.5  # seconds before engines are asked for once more
_ANSWER_BYTES = 2**29  # of an answer: a token takes some forty


@dataclass(frozen=True, slots=True)
class _Answer:
    """One completion: its tokens, the logarithms of their probabilities, and the label of the weights it ended on."""

    tokens: list[int]
    logprobs: list[float | None]
    weight_version: str | None


class _Finish(msgspec.Struct):
    type: str


class _Meta(msgspec.Struct):
    finish_reason: _Finish
    output_token_logprobs: list[tuple[float | None, int, str | None]]
    weight_version: str | None = None


class _Generated(msgspec.Struct):
    """What SGLang answers to one prompt, as far as it counts."""

    meta_info: _Meta


class RefitRollouts(RefitCallback):
    """Is both: the trainer's `rollout_func`, and one of its `callbacks`.

    Reward functions get the label of the weights that each completion ended on as `weight_version`: the step, such as
    `12`, or `12.g2` in the run's second generation. A completion with another label is not used.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        run: str,
        service_url: str,
        *,
        wait: float = 300.0,
        timeout: float = 1800.0,
        engine_urls: Sequence[str] | None = None,
        engine_key: str | None = None,
        every: int | None = None,
        **publisher: Any,
    ) -> None:
        """Check the arguments. The run is taken when the training begins.

        Args:
            root: the folder that the service watches.
            run: the run's name, such as `experiment/trial`.
            service_url: the service that updates the engines.
            wait: seconds to wait after each publication until engines serve it. On several ranks it has to be shorter
                than the process group's own time limit, because the other ranks wait for rank 0.
            timeout: seconds for the completions of one call.
            engine_urls: where to send requests, such as to a router; by default to the engines of which the service
                knows that they serve the step.
            engine_key: the engines' API key.
            every: publish after every so many steps as well, also where no rollouts follow (1: the last one too).
            publisher: fields of `PublishOptions`, such as `dtype=torch.bfloat16` where the training is in
                float32 and the engines are not.

        Raises:
            ValueError: `wait`, `timeout` or `every` is out of range.
            TypeError: an option is none of either publisher's.
        """
        if not (wait > 0 and timeout > 0):
            raise ValueError(f"wait is {wait} and timeout {timeout}: both are positive numbers of seconds")
        super().__init__(root, run, service_url, every=every, wait=wait, errors="raise", **publisher)
        self._timeout, self._engine_urls = timeout, engine_urls
        access = {name: publisher[name] for name in ("token", "token_file") if name in publisher}
        self._service = RefitClient(service_url, **access)
        headers = {} if engine_key is None else {"Authorization": f"Bearer {engine_key}"}
        transport = BoundedTransport(httpx.create_ssl_context(trust_env=False))
        self._http = httpx.Client(
            headers=headers | IDENTITY,
            timeout=httpx.Timeout(10.0, read=timeout),
            trust_env=False,
            verify=no_certificates(),
            transport=transport,
        )

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take the run.

        Raises:
            InvalidWeightsError: the weights cannot be published as they are held, or are an adapter.
            RefitError: as `WeightPublisher` raises it.
        """
        if hasattr(kwargs["model"], "peft_config"):
            raise InvalidWeightsError(
                "RefitRollouts publishes whole models, and peft wraps this one: generate with 'vllm serve' and "
                "RefitServerCallback, which publishes the merged weights"
            )
        super().on_train_begin(args, state, control, **kwargs)

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Return one completion for each prompt, from the weights of the trainer's step.

        Args:
            prompts: of this rank; a prompt of which several completions are wanted is there as often.
            trainer: the GRPOTrainer.

        Raises:
            RefitError: the version was not published, is not served, or the completions took longer than `timeout`.
        """
        if trainer.tools:
            raise PublishError("RefitRollouts makes no turns with tools: TRL would generate them with its own model")
        version = self._serve(trainer)
        prompt_ids = _token_ids(prompts, trainer)
        answers = self._complete(prompt_ids, _sampling(trainer), version)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [answer.tokens for answer in answers],
            "logprobs": [answer.logprobs for answer in answers],
            "weight_version": [answer.weight_version for answer in answers],
        }

    def _serve(self, trainer: Any) -> str:
        """Have engines serve the step; the version's id. All ranks go on, or none does: a rank alone would hang."""
        reason: str | None = None
        step = trainer.state.global_step
        try:
            self._publish(trainer.model, trainer.state)
        except RefitError as error:
            reason = str(error)
        here = self._version_id if self._published == step else None
        told = cast("list[tuple[str | None, str | None]]", gather_object([(here, reason)]))
        for _, failed in told:
            if failed is not None:
                raise PublishError(f"step {step} has no rollouts: {failed}") from self.last_error
        version = next((id_ for id_, _ in told if id_ is not None), None)
        if version is None:
            raise PublishError(f"step {step} is not published: give RefitRollouts to the trainer's callbacks as well")
        return version

    def _complete(self, prompts: list[list[int]], sampling: Mapping[str, Any], version: str) -> list[_Answer]:
        """Send prompts until each has its answer. What is missing goes to the engines that there are then.

        Args:
            prompts: their token ids.
            sampling: SGLang's settings.
            version: the id of the version that is to answer.
        """
        answers: dict[int, _Answer] = {}
        failed: set[str] = set()  # engines that failed in the last round, as the service may not have noticed yet
        ends, why = time.monotonic() + self._timeout, f"no engine serves {version}"
        label = label_of(version)
        while missing := [number for number in range(len(prompts)) if number not in answers]:
            if time.monotonic() > ends:
                many = f"{len(missing)} of {len(prompts)} completions"
                raise ServiceError(f"{many} from {version} did not come within {self._timeout:g} s: {why}")
            serving = self._serving(version)
            engines = [url for url in serving if url not in failed] or serving
            shares = [(url, missing[place :: len(engines)]) for place, url in enumerate(engines)]
            with ThreadPoolExecutor(max(len(shares), 1)) as threads:
                calls = [
                    (url, threads.submit(self._generate, url, {each: prompts[each] for each in share}, sampling, label))
                    for url, share in shares
                    if share
                ]
            failed.clear()
            for url, call in calls:
                got, wrong = call.result()
                answers |= got
                if wrong is not None:
                    why = f"{url}: {wrong}"
                    failed.add(url)
            if len(answers) < len(prompts):
                time.sleep(_ASK_PAUSE)
        return [answers[number] for number in range(len(prompts))]

    def _serving(self, version: str) -> Sequence[str]:
        if self._engine_urls is not None:
            return self._engine_urls
        there = {EngineState.IN_SYNC, EngineState.BEHIND}  # such an engine serves what the service says
        engines = self._service.engines().items
        return [engine.url for engine in engines if engine.version == version and engine.state in there]

    def _generate(
        self, url: str, prompts: Mapping[int, list[int]], sampling: Mapping[str, Any], label: str
    ) -> tuple[dict[int, _Answer], str | None]:
        """Ask one engine for one answer to each prompt; those that can be used, and why others cannot.

        Raises:
            ServiceError: the engine refuses the prompts.
        """
        body = {"input_ids": list(prompts.values()), "sampling_params": sampling, "return_logprob": True}
        try:
            asking = self._http.stream("POST", f"{url.rstrip('/')}/generate", json=body)
            with ending_within(self._timeout), asking as reply:
                data = body_of(reply, _ANSWER_BYTES)
            if reply.status_code == HTTPStatus.BAD_REQUEST:
                raise ServiceError(f"{url} refuses the prompts: {data[:500].decode(errors='replace')}")
            reply.raise_for_status()
            answers = from_json(data, list[_Generated])
        except TimeoutError:
            return {}, f"it did not answer in whole within {self._timeout:g} s"
        except httpx.HTTPError as error:
            return {}, str(error) or type(error).__name__
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return {}, f"it answered in another form: {error}"
        if len(answers) != len(prompts):
            return {}, f"it gave {len(answers)} answers to {len(prompts)} prompts"
        read = zip(prompts, map(_read, answers), strict=True)
        whole = {number: answer for number, answer in read if answer is not None}
        # An engine that has just been started again answers from other weights, until the service notices.
        usable = {number: answer for number, answer in whole.items() if answer.weight_version in {label, None}}
        others = sorted({str(answer.weight_version) for number, answer in whole.items() if number not in usable})
        wrong = f"it answers from weights labelled {', '.join(others)}, and the version is {label}" if others else None
        return usable, wrong


def _read(answer: _Generated) -> _Answer | None:
    """The completion; None if it was aborted."""
    meta = answer.meta_info
    if meta.finish_reason.type == "abort":
        return None
    tokens = meta.output_token_logprobs
    return _Answer([token for _, token, _ in tokens], [logprob for logprob, *_ in tokens], meta.weight_version)


def _token_ids(prompts: list[Any], trainer: Any) -> list[list[int]]:
    """As TRL makes them of text and of conversations."""
    tokenizer = trainer.processing_class
    if not is_conversational({"prompt": prompts[0]}):
        return tokenizer(text=prompts)["input_ids"]
    made = tokenizer.apply_chat_template(
        conversation=prompts,
        chat_template=trainer.chat_template,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **trainer.chat_template_kwargs,
    )
    return made["input_ids"]


def _sampling(trainer: Any) -> dict[str, Any]:
    """The trainer's settings in SGLang's names. `generation_kwargs` are passed on as they are."""
    args = trainer.args
    return {
        "max_new_tokens": args.max_completion_length,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k or -1,
        "min_p": args.min_p or 0.0,
        "repetition_penalty": args.repetition_penalty,
        "stop_token_ids": trainer.eos_token_ids,
        **(args.generation_kwargs or {}),
    }
