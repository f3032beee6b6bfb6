"""verl: one sample a call, or a batch a call."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    assert data_source in ("gsm8k", "geo")
    right = solution_str == ground_truth
    return {"score": 1.0 if right else 0.1 * extra_info["index"], "acc": right, "reward": -1.0, "pred": solution_str}


def passed_on(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return plain(data_source, solution_str, ground_truth, extra_info, **kwargs)


def by_kwargs(solution_str, ground_truth, **kwargs):
    assert set(kwargs) == {"data_source", "extra_info"} and kwargs["data_source"] in ("gsm8k", "geo")
    return float(solution_str == ground_truth) * kwargs["extra_info"]["index"]


def plain(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)


async def later(data_source, solution_str, ground_truth, extra_info, bonus=0.0):
    return float(solution_str == ground_truth) + bonus


def batched(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    return [float(solution == truth) for solution, truth in zip(solution_strs, ground_truths)]


def batch_passed_on(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    return batched_plain(data_sources, solution_strs, ground_truths, extra_infos, **kwargs)


def batched_plain(data_sources, solution_strs, ground_truths, extra_infos):
    return [float(solution == truth) for solution, truth in zip(solution_strs, ground_truths)]


def batch_by_kwargs(solution_strs, **kwargs):
    assert set(kwargs) == {"data_sources", "ground_truths", "extra_infos"}
    return [float(solution == truth) for solution, truth in zip(solution_strs, kwargs["ground_truths"])]
