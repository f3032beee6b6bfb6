import pytest

from lightrft_visual.config import registry
from lightrft_visual.errors import ConfigError
from lightrft_visual.rewards.registry import build_scorer, check_scorer, register_scorer


def test_unknown_name_and_setting_give_the_nearest():
    with pytest.raises(ConfigError, match="'exct'; did you mean 'exact'"):
        build_scorer("exct")
    with pytest.raises(ConfigError, match="no setting 'tolerence'; did you mean 'tolerance'"):
        check_scorer("numeric", {"tolerence": 1})
    with pytest.raises(ConfigError, match="needs the setting 'head'"):
        build_scorer("aesthetic")


def test_settings_under_the_names_of_other_systems(tmp_path):
    with pytest.raises(ConfigError, match="needs the setting 'head'"):
        build_scorer("aesthetic", {"model_name": "openai/clip-vit-large-patch14"})
    with pytest.raises(ConfigError, match=str(tmp_path)):
        build_scorer("clip_score", {"model_name": str(tmp_path / "clip")})
    with pytest.raises(ConfigError, match="no setting 'model_name'"):
        check_scorer("numeric", {"model_name": "x"})


def test_register_function_and_class(monkeypatch):
    monkeypatch.setattr(registry.scorers, "_entries", dict(registry.scorers._entries))

    @register_scorer("length")
    def length(completions, scale=1.0):
        return [scale * len(c) for c in completions]

    assert build_scorer("length", {"scale": 2.0})(completions=["abc"]) == [6.0]
    with pytest.raises(ConfigError, match="registered already"):
        register_scorer("length")(lambda completions: [])
    with pytest.raises(ConfigError, match="registered already"):
        register_scorer("exact")(length)
