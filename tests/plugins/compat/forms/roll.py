"""ROLL: the rule inside a reward worker, for one response."""


def single_choice_reward(response, ground_truth):
    correct = response == ground_truth
    return response[:1], 1.0 if correct else -1.0, response.islower(), correct


def plain(response, answer):
    return response == answer


def passed_on(response, answer, **kwargs):
    return plain(response, answer, **kwargs)
