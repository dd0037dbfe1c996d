"""The manual's table is the one in the code; its command shows files."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerofx.integrations.deepspeed.__main__ import key_table, main

ROOT = Path(__file__).parents[2]


def test_the_table_of_keys_is_up_to_date() -> None:
    text = (ROOT / "docs" / "deepspeed.md").read_text()
    shown = text.partition("<!-- keys -->\n")[2].partition("<!-- end of keys -->")[0]
    assert shown == key_table(), "put in what `python -m zerofx.integrations.deepspeed` prints"


def test_the_command_prints_keys_and_files(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    assert capsys.readouterr().out == key_table()
    lr, steps = "--auto=optimizer.params.lr=1e-3", "--auto=scheduler.params.total_num_steps=50"
    main([str(ROOT / "examples" / "ds_config.json"), "--world-size=3", lr, steps])
    shown = capsys.readouterr().out
    assert "batch: 48 = 8 (micro-batch) × 2 (accumulation) × 3 (ranks)" in shown
    assert "option stage: 3" in shown
    with pytest.raises(SystemExit, match=r"optimizer\.params\.lr"):
        main([str(ROOT / "examples" / "ds_config.json")])
    with pytest.raises(SystemExit, match="KEY=VALUE"):
        main([str(ROOT / "examples" / "ds_config.json"), "--auto=optimizer.params.lr=fast"])
