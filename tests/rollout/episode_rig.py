"""Episodes of a tiny model: environments that answer in a way that is known, and the stage around an engine."""

from typing import Any

from engine_rig import Rig, enders, hf_rig
from tiny_models import picture

from lightrft_visual.config.environment import EpisodeConfig
from lightrft_visual.experience.rollouts import PromptBatch
from lightrft_visual.models.loading import Checkpoint
from lightrft_visual.rollout.conversation import ObservationRenderer
from lightrft_visual.rollout.environment_threads import ThreadHost
from lightrft_visual.rollout.environments import Environment
from lightrft_visual.rollout.episodes import EpisodeStage
from lightrft_visual.rollout.multimodal import MultimodalDataProcessor

USER = "<|im_start|>user\n"


class Scripted(Environment):
    """As many turns as the sample says, each with an observation of another kind: image, text, both."""

    def reset(self, row: dict[str, Any]) -> None:
        self.seed, self.left, self.turn = row["seed"], row.get("turns", 3), 0

    def step(self, action):
        self.turn += 1
        if self.turn >= self.left:
            return None, float(self.turn), True, {"turn": self.turn}
        image = picture(self.seed % 1000 + self.turn, 56, 84)
        kinds = [image, "what then?", [image, "which one?"], {"role": "tool", "content": [image, image]}]
        return kinds[(self.turn - 1) % 4], float(self.turn), False, {}


def most_begun(stage: EpisodeStage) -> list[int]:
    """[environments that there were at once at most, those that have not ended], kept up to date from here on."""
    host, begun, counts = stage.host, set(), [0, 0]
    reset, end = host.reset, host.end

    def counted_reset(episode, row):
        begun.add(episode)
        counts[:] = max(counts[0], len(begun)), len(begun)
        return reset(episode, row)

    def counted_end(episode):
        begun.discard(episode)
        counts[1] = len(begun)
        end(episode)

    host.reset, host.end = counted_reset, counted_end
    return counts


def batch_of(turns: list[int], images: bool = True) -> PromptBatch:
    """A prompt for each number of turns."""
    media = "<|vision_start|><|image_pad|><|vision_end|>" if images else ""
    return PromptBatch.of(
        [f"{USER}{media}how many? {n}<|im_end|>\n<|im_start|>assistant\n" for n in turns],
        [[picture(n)] if images else [] for n in turns],
        metadata=[{"turns": n} for n in turns],
    )


def rig_of(checkpoint: Checkpoint, size: int = 8) -> Rig:
    return hf_rig(checkpoint, size, banned=enders(checkpoint))


def limits_of(turns: int, tokens: int, on_error: str = "mask", environments: int = 128, **more: str) -> EpisodeConfig:
    own = {"on_environment_error": on_error, "max_environments": environments, **more}
    return EpisodeConfig(environment="zoom", max_turns=turns, max_episode_tokens=tokens, **own)


def stage_of(
    rig: Rig, make=Scripted, seconds: float = 20.0, limits: EpisodeConfig | None = None, most_tokens=None, **kwargs
) -> EpisodeStage:
    checkpoint = rig.checkpoint
    data = MultimodalDataProcessor(checkpoint.tokenizer, checkpoint.processor, 1024)
    ends = checkpoint.tokenizer.convert_ids_to_tokens(checkpoint.eos_ids)
    renderer = ObservationRenderer(data, ends, most_tokens, kwargs.pop("most_media", None))
    limits = limits or limits_of(6, 400)
    most = limits.most_tokens(data.prompt_max_len)
    return EpisodeStage(rig.engine, data, 3, ThreadHost(make, seconds), renderer, limits, most, **kwargs)
