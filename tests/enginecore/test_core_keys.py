"""Keys of an engine on tcp://: the first start makes them and says the public one, whatever else is missing."""

import logging

import pytest

from quire.enginecore.daemon import _core_keys
from quire.ipc.config import EngineConfig
from quire.ipc.links.curve import load_keys, make_keys


def test_the_first_start_says_the_public_key_before_it_fails_for_want_of_an_allow_list(tmp_path, caplog):
    own, allow = tmp_path / "engine.key", tmp_path / "frontends.allow"
    config = EngineConfig(listen="tcp://127.0.0.1:*", curve_secret_key_file=str(own), curve_allow_file=str(allow))
    with (
        caplog.at_level(logging.INFO, logger="quire.enginecore"),
        pytest.raises(ValueError, match=r"frontends\.allow is not there"),
    ):
        _core_keys(config)
    assert load_keys(own).public.decode() in caplog.text
    frontend = make_keys()
    allow.write_text(frontend.public.decode() + "\n")
    keys = _core_keys(config)
    assert keys.own == load_keys(own) and keys.allowed == {frontend.public}
