"""The synchronous source: the sampler generates a step's rollouts while the trainer waits.

Every rank samples and scores its share of the step's completions; rank 0 gathers them.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from grpo_replay.distributed.comm import Comm
from grpo_replay.errors import ServersLost
from grpo_replay.replay.rollouts import assemble_rollouts, group_requests
from grpo_replay.rewards.scorer import GradingRequest
from grpo_replay.sampling.completion_text import CompletionText
from grpo_replay.sampling.sampler_protocol import checked_completions
from grpo_replay.storage.checkpoint import RunState
from grpo_replay.training.rollout_source import Metrics, Parts, StepRecord, StepRollouts
from grpo_replay.training.weight_sync import (
    PushedWeights,
    gap_sample,
    read_pushed_weights,
    sync_weights,
)
from grpo_replay.types import (
    Completion,
    GenerationRequest,
    Graded,
    Prompt,
    RequestKey,
    Rollout,
)


class SynchronousSource:
    """Implements `rollout_source.RolloutSource`.

    With `run.sync_every_steps` above 1 the sampler lags behind the policy on purpose (a stand-in
    for asynchrony, paper B): rank 0 then keeps a copy of the weights that it has, for checkpoints.
    """

    def __init__(self, parts: Parts, state: RunState) -> None:
        self.parts, self.comm, self.recipe, self.state = parts, parts.comm, parts.recipe, state
        self._text = CompletionText.from_recipe(parts.recipe, parts.tokenizer)
        lags = parts.recipe.run.sync_every_steps > 1
        self._pushed = PushedWeights() if lags and parts.comm.is_main else None

    @classmethod
    def open(cls, parts: Parts, state: RunState, checkpoint: Path | None) -> "SynchronousSource":
        """Open the source. After a resume the sampler gets the weights that it had at `checkpoint`:
        the policy, or older ones if it lags."""
        source = cls(parts, state)
        if checkpoint is not None:
            source._restore(checkpoint)
        return source

    def _restore(self, checkpoint: Path) -> None:
        """Gives the sampler the weights that it had at the `checkpoint`: older ones than the
        policy's if it lags on purpose. Otherwise, and if `sampling.lora` was changed between
        adapters and merged weights, it gets the policy."""
        lags = self.recipe.run.sync_every_steps > 1
        saved = read_pushed_weights(checkpoint) if lags else None
        if saved is None:
            self._push(self.state.policy_version)
            return
        weights, version = saved
        if version == 0:
            return  # the sampler was opened with version 0
        are_adapters = any(".lora_A." in name for name in weights)
        if are_adapters != self.recipe.pushes_adapters:
            self._push(self.state.policy_version)
            return
        tensors, pushed = iter(weights.items()), self._pushed
        self.parts.sampler.load_weights(
            pushed.keep(tensors, version) if pushed else tensors, version
        )

    def take(self, step: int) -> StepRollouts | None:
        """Take prompts, sample G completions of each, score them as they finish, and compute
        group advantages; again for dropped groups, up to `sampling.max_refills` times (DAPO).
        None if no server is left on a rank."""
        settings = self.recipe.sampling
        generated: list[Rollout] = []
        taken, missing = 0, settings.prompts_per_step
        for refills_left in reversed(range(settings.max_refills + 1)):
            is_last = refills_left == 0
            sampled = self._sample_prompts(step, taken, missing, is_last)
            if sampled is None:
                return None
            generated += sampled
            taken += missing
            if is_last:
                break
            survivors = len({rollout.group_id for rollout in generated if rollout.kept})
            missing = self.comm.broadcast(settings.prompts_per_step - survivors)
            if missing == 0:
                self._sleep()
                break
        uses_trainer_logprobs = self.recipe.loss.behavior_logprobs == "trainer"
        return StepRollouts(
            generated=generated,
            measured=gap_sample(generated, every_survivor=uses_trainer_logprobs),
            nominal_rollouts=taken * settings.group_size,
            prompts=taken,
            groups=taken,
            generation_seconds=self.parts.clock.seconds["generation"],
        )

    def _sample_prompts(
        self, step: int, first: int, count: int, is_last: bool
    ) -> list[Rollout] | None:
        """Samples and grades the step's prompts `first` … `first + count - 1`. Returns their
        rollouts on rank 0, an empty list on others; None on every rank if no server is left on one.
        If `is_last`, the sampler sleeps afterwards."""
        parts, comm, run = self.parts, self.comm, self.recipe.run
        taken = parts.prompts.take(self.state.prompt_cursor + first, count)
        prompts = dict(enumerate(taken, start=first))
        with parts.clock.stage("generation"):
            all_requests = group_requests(prompts, step, self.recipe.sampling, run.seed)
            requests = share_of_rank(all_requests, comm.rank, comm.world_size)
            sampled: list[tuple[Completion, str]] = []
            try:
                sampled += self._sample(requests, prompts)
            except ServersLost as error:
                parts.stop.end(error)
            if any(comm.all_gather(parts.stop.error is not None)):
                return None
            if is_last:
                self._sleep()
        with parts.clock.stage("reward"):
            verdicts = parts.scorer.results()
            errors = comm.all_gather(parts.scorer.first_error)  # rank 0 tells the user
            parts.scorer.first_error = next(filter(None, errors), None)
            local_results = {c.key: Graded(c, text, verdicts[c.key]) for c, text in sampled}
            graded = gather_graded(comm, local_results)
            if not comm.is_main:
                return []
            return assemble_rollouts(
                prompts,
                graded,
                self.recipe,
                step=step,
                first_rollout_id=self.state.next_rollout_id,
                first_group_id=self.state.next_group_id,
            )

    def _sample(
        self, requests: Sequence[GenerationRequest], prompts: Mapping[int, Prompt]
    ) -> Iterator[tuple[Completion, str]]:
        """Yield completions with their texts as they finish, and submit them to the scorer."""
        parts = self.parts
        sizes = Counter(request.key.prompt_index for request in requests)
        finished = checked_completions(parts.sampler, requests)
        for completion in finished:
            step, number = completion.key.step, completion.key.prompt_index
            token_ids = completion.token_ids.tolist()
            text = self._text.decode(token_ids)
            request = GradingRequest.for_prompt(
                prompts[number], text, token_ids, step=step,
                truncated=completion.finish_reason == "length",
                group=f"{step}.{number}", group_size=sizes[number],
            )  # fmt: skip
            parts.scorer.submit(completion.key, request)
            yield completion, text

    def _sleep(self) -> None:
        # The push at the end of the step replaces the weights, even if nothing was trained on.
        push_follows = self._push_is_due(self.state.policy_version + 1)
        self.parts.sampler.sleep(keep_weights=not push_follows)

    def advance(self, version: int) -> None:
        """Push every `run.sync_every_steps`-th version."""
        if self._push_is_due(version):
            with self.parts.clock.stage("sync"):
                self._push(version)

    def _push_is_due(self, version: int) -> bool:
        return version % self.recipe.run.sync_every_steps == 0

    def _push(self, version: int) -> None:
        sync_weights(self.parts.engine, self.parts.sampler, version, self._pushed)

    def metrics(self, record: StepRecord) -> Metrics:
        return {"sampler/policy_version": record.generated[0].policy_version}

    def save(self, folder: Path) -> None:
        """Write the older weights of a sampler that lags."""
        if self._pushed is not None and self._pushed.version != self.state.policy_version:
            self._pushed.save(folder)


def share_of_rank(
    requests: Sequence[GenerationRequest], rank: int, ranks: int
) -> Sequence[GenerationRequest]:
    """Returns the consecutive requests that one rank samples, so that those of a prompt mostly stay
    on one rank. The counts of two ranks differ by at most one."""
    count = len(requests)
    return requests[count * rank // ranks : count * (rank + 1) // ranks]


def gather_graded(
    comm: Comm, local_results: Mapping[RequestKey, Graded]
) -> dict[RequestKey, Graded]:
    """Returns all ranks' completions by key, on rank 0; empty on other ranks. Collective."""
    gathered = comm.gather(list(local_results.values()))
    results = (graded for rank_results in gathered or () for graded in rank_results)
    return {graded.completion.key: graded for graded in results}
