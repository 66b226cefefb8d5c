"""The table that ``make probe`` prints."""

from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from probe import report
from probe.__main__ import main
from support.probe_page import PAGE

#: Name to count, mean, p50, p90, p99 and milliseconds a step.
ROWS = {
    "execute_model": "10 1.500 1.500 1.900 1.990 1.500",
    "fence: output": "5 2.000 0.625 2.000 2.000 1.000",
    "output_interval": "9 55.556 0.000 0.000 0.000 50.000",
    "inter-token latency": "2 3.000 2.000 3.600 3.960",
}


def test_each_process_has_a_table_and_tokens_a_rate() -> None:
    lines = [" ".join(line.split()) for line in report.text(PAGE).splitlines()]
    head = "count mean ms p50 ms p90 ms p99 ms ms a step"
    rows = [f"{name} {cells}" for name, cells in ROWS.items()]
    clients = [f"clients {head}", rows[3], ""]
    assert lines == [*clients, f"rank0 {head}", *rows[:3], "", "160.0 tokens/s, pauses left out"]


def test_a_servers_page_and_a_file_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(PAGE.encode())

        def log_message(self, *_: object) -> None:
            """Leave standard error to the program."""

    (tmp_path / "page").write_text(PAGE)
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.handle_request)
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}/metrics"
        for source in (address, str(tmp_path / "page")):
            assert main([source]) == 0
            assert capsys.readouterr() == (report.text(PAGE), "")
        thread.join()


@pytest.mark.parametrize(
    ("page", "sentence"),
    [
        (None, "No such file"),
        ("", "Set VLLM_READINESS_PROBE before the engine starts"),
        (PAGE.replace("readiness", "other"), "there are no metrics of the probe"),
    ],
)
def test_a_source_without_the_probe_is_refused_with_the_next_step(
    page: str | None, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "page"
    if page is not None:
        file.write_text(page)
    assert main([str(file)]) == 1
    output, error = capsys.readouterr()
    assert (output, error.count("\n")) == ("", 1)
    assert str(file) in error
    assert sentence in error
    assert main([""]) == 1
    assert "make probe FILE=" in capsys.readouterr().err
