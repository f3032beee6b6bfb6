"""UnifiedReward (arXiv 2503.05236): a vision-language model that writes scores of 1 to 5, asked by its own prompts.

It runs behind an OpenAI-compatible server, such as `vllm serve CodeGoat24/UnifiedReward-qwen-7b`. Prompts are those
that its weights were trained with; replies are read by the labels that they teach.
"""

from dataclasses import replace

from ...config.shared import RewardConfig
from ...errors import ConfigError
from .vlm_judge import VLMJudge

CRITERIA = (
    "You are given a text caption and a generated image based on that caption. Your task is to evaluate this "
    "image based on two key criteria:\n"
    "1. Alignment with the Caption: Assess how well this image aligns with the provided caption. Consider the "
    "accuracy of depicted objects, their relationships, and attributes as described in the caption.\n"
    "2. Overall Image Quality: Examine the visual quality of this image, including clarity, detail preservation, "
    "color accuracy, and overall aesthetic appeal.\n"
)
CAPTION = "Your task is provided as follows:\nText Caption: [{prompt}]"
SCORE = "Based on the above criteria, assign a score from 1 to 5 after 'Final Score:'.\n"
ELEMENTS = (
    "Extract key elements from the provided text caption, evaluate their presence in the generated image using "
    "the format: 'element (type): value' (where value=0 means not generated, and value=1 means generated), and "
    "assign a score from 1 to 5 after 'Final Score:'.\n"
)
AXES = (
    "You are presented with a generated image and its associated text caption. Your task is to analyze the image "
    "across multiple dimensions in relation to the caption. Specifically:\n"
    "Provide overall assessments for the image along the following axes (each rated from 1 to 5):\n"
    "- Alignment Score: How well the image matches the caption in terms of content.\n"
    "- Coherence Score: How logically consistent the image is (absence of visual glitches, object distortions, "
    "etc.).\n- Style Score: How aesthetically appealing the image looks, regardless of caption accuracy.\n\n"
    "Output your evaluation using the format below:\n\nAlignment Score (1-5): X\nCoherence Score (1-5): Y\n"
    "Style Score (1-5): Z\n\n"
)
NUMBER = r"\**\s*:\s*\**\s*([1-5](?:\.[0-9]+)?)(?![0-9])"
# What is asked for -> (question, the pattern of the score's label).
ASKED = {
    "final": (CRITERIA + SCORE + CAPTION, "Final Score"),
    "elements": (CRITERIA + ELEMENTS + CAPTION, "Final Score"),
    "alignment": (AXES + CAPTION, r"Alignment Score(?:\s*\(1-5\))?"),
    "coherence": (AXES + CAPTION, r"Coherence Score(?:\s*\(1-5\))?"),
    "style": (AXES + CAPTION, r"Style Score(?:\s*\(1-5\))?"),
}


def question_and_pattern(ask: str) -> tuple[str, str]:
    """How the model is asked for `ask` and read. Raises ConfigError for a name that is not in ASKED."""
    if ask not in ASKED:
        raise ConfigError(f"scorer unified_reward: ask is {ask!r}; it must be one of: {', '.join(ASKED)}")
    question, label = ASKED[ask]
    return question, label + NUMBER


class UnifiedReward(VLMJudge):
    """Its score over 5, as in flow_grpo. A reply without the score is a failure, never a 0.

    url: the server's base, such as http://host:8000/v1, or `a|b` for replicas. ask, by the model's version: `elements`
    (v1.0, which lists the caption's elements first), `final` (v1.5), or one of the axes `alignment`, `coherence`,
    `style` (2.0).
    """

    name = "unified_reward"

    def __init__(
        self,
        url: str,
        model: str = "CodeGoat24/UnifiedReward-qwen-7b",
        ask: str = "elements",
        max_tokens: int = 512,
        timeout: float | None = None,
        concurrency: int | None = None,
        token_env: str | None = None,
        reward_config: RewardConfig | None = None,
    ) -> None:
        question, pattern = question_and_pattern(ask)
        own = (timeout, concurrency, token_env, reward_config)
        super().__init__(url, model, question, pattern, 0.0, 5.0, max_tokens, *own)
        self.judging = replace(self.judging, sources=False)  # its questions are of one image
