"""A vision-language model behind an OpenAI-compatible server as a scorer."""

from __future__ import annotations

from concurrent.futures import Future

from ...config.shared import RewardConfig
from ..batch import Call, PendingSource, RewardBatch, Scores
from ..remote.client import RemoteClient
from ..remote.judge import SCORE_PATTERN, HTTPJudge, Judging


class VLMJudge(PendingSource):
    """Asks the model at `url` (its base, such as http://host:8000/v1) about each sample with its images; see
    `judge.Judging` for question and pattern. token_env: environment variable with the server's key."""

    name = "vlm_judge"

    def __init__(
        self,
        url: str,
        model: str,
        question: str | None = None,
        pattern: str = SCORE_PATTERN,
        low: float = 0.0,
        high: float = 10.0,
        max_tokens: int = 256,
        timeout: float = 60.0,
        concurrency: int = 32,
        token_env: str | None = None,
    ) -> None:
        judging = Judging(question, pattern, low, high, max_tokens)
        config = RewardConfig(reward_timeout=timeout, reward_concurrency=concurrency, reward_token_env=token_env)
        self._client = RemoteClient(config)
        self._judge = HTTPJudge(url, model, self._client, judging)

    def submit(self, batch: RewardBatch, call: Call) -> Future[Scores]:
        """Ask about every sample at once."""
        return self._judge.submit(batch, call)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
