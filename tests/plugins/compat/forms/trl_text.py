"""TRL: standard completions, columns by keyword, the trainer's state, logs of its own."""


def accuracy(prompts, completions, answer, **kwargs):
    assert all(isinstance(completion, str) for completion in completions)
    return [1.0 if completion.strip() == str(expected) else 0.0 for completion, expected in zip(completions, answer)]


def warm_up(completions, trainer_state, **kwargs):
    share = min(1.0, trainer_state.global_step / 4)
    return [share * len(completion) for completion in completions]


def with_logs(prompts, completions, log_extra=None, log_metric=None, **kwargs):
    lengths = [len(completion) for completion in completions]
    log_extra("length", lengths)
    log_extra("text", completions)
    log_metric("mean_length", sum(lengths) / len(lengths))
    return [None if length == 1 else 1.0 for length in lengths]
