"""A run as one HTML page, made from its Markdown."""

from __future__ import annotations

from html import escape

from bench.errors import Failure
from bench.reports.markdown import markdown
from bench.reports.run_file import Json

_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
      content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: auto; padding: 1rem; }}
p, li {{ overflow-wrap: anywhere; }}
pre, .table {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; }}
th, td {{ padding: 0.2rem 0.8rem; border-bottom: 1px solid #8886; text-align: left; }}
thead th {{ border-bottom-color: currentcolor; }}
/* A ratio in bold is better than stock's, one in italics worse. */
td strong {{ color: #116329; }}
td em {{ color: #b3261e; }}
@media (prefers-color-scheme: dark) {{
  td strong {{ color: #7ee787; }}
  td em {{ color: #ff8a80; }}
}}
</style>
</head>
<body>
{body}</body>
</html>
"""


def page(run: Json) -> str:
    """Return the run as one HTML page, which needs no other file and no network.

    Raises:
        Failure: markdown-it-py is not installed.
    """
    try:
        from markdown_it import MarkdownIt
    except ImportError as error:
        raise Failure(f"the page needs markdown-it-py, as in build/env ({error})") from error

    # Without "html", a run's names stay text.
    body: str = MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown(run))
    # A wide table scrolls by itself; nothing else can hold these tags.
    body = body.replace("<table>", '<div class="table"><table>')
    body = body.replace("</table>", "</table></div>")
    title = f"vLLM {run['versions']['vllm'] or 'unknown'} on {run['machine']['device']}"
    return _PAGE.format(title=escape(f"{title}, {run['date']}"), body=body)
