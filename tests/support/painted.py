"""What is painted of a page, and whether it can be read."""

import re

#: Every text that is painted, as it is painted: its size in CSS pixels, and its colours.
PAINTED = """() => {
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walk.nextNode(); node; node = walk.nextNode()) {
    const element = node.parentElement;
    if (!node.data.trim() || element.closest('script') || !element.checkVisibility()) continue;
    const style = getComputedStyle(element);
    const svg = element.closest('svg');
    const to = svg && element.getScreenCTM();
    const scale = svg ? Math.hypot(to.a, to.b) : 1;
    let paper = element;
    while (paper && getComputedStyle(paper).backgroundColor === 'rgba(0, 0, 0, 0)')
      paper = paper.parentElement;
    found.push({
      text: node.data.trim(),
      size: parseFloat(style.fontSize) * scale,
      ink: svg ? style.fill : style.color,
      paper: paper ? getComputedStyle(paper).backgroundColor : 'rgb(255, 255, 255)',
    });
  }
  return found;
}"""


def luminance(colour: str) -> float:
    """The relative luminance of "rgb(...)", as WCAG defines it."""
    channels = [int(each) / 255 for each in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    """The contrast of two colours, from 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
