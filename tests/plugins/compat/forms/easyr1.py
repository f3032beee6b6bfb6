"""EasyR1: a list of inputs in, a list of dicts with `overall` out; the sequential and the older forms."""

REWARD_NAME, REWARD_TYPE = "math", "batch"


def _scores(response, truth, weight):
    accuracy, form = float(response == truth), float(response.islower())
    return {"overall": (1 - weight) * accuracy + weight * form, "format": form, "accuracy": accuracy}


def compute_score(reward_inputs, format_weight=0.1):
    if not isinstance(reward_inputs, list):
        raise ValueError("Please use `reward_type=batch`.")
    assert all(each["response_length"] > 0 for each in reward_inputs)
    return [_scores(each["response"], each["ground_truth"], format_weight) for each in reward_inputs]


def sequential(reward_input, format_weight=0.1):
    return _scores(reward_input["response"], reward_input["ground_truth"], format_weight)


def older(predicts, ground_truths, format_weight=0.1):
    return [_scores(predict, truth, format_weight) for predict, truth in zip(predicts, ground_truths)]


def oldest(predict, ground_truth):
    return _scores(predict, ground_truth, 0.1)


def passed_on(reward_inputs, **kwargs):
    return compute_score(reward_inputs, **kwargs)
