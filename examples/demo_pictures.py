"""Text graphics for the demo, made of characters, so that they look right on any terminal and in a log file."""

import math

import torch
from rich.table import Table
from rich.text import Text

SHADES = " ░▒▓█"


def curves(line, dots, names, width=72, height=12):
    """Two curves on top of each other on a logarithmic scale: the first as a line, the second as dots."""
    values = [math.log10(value) for value in (*line, *dots)]
    low, high = min(values), max(values)
    canvas = _Canvas(width, height)
    canvas.draw_line([(math.log10(value) - low) / (high - low or 1) for value in line])
    canvas.draw_dots([(math.log10(value) - low) / (high - low or 1) for value in dots])

    text = Text("   loss    ")
    text.append(f"⠤⠒ {names[0]}", style="cyan")
    text.append("    ")
    text.append(f"● {names[1]}", style="bold yellow")
    text.append(" (every few steps)\n")
    for row, cells in enumerate(canvas.cells):
        at = high - (high - low) * row / (height - 1)
        text.append(f"{10**at:7.3f} ┤" if row % 3 == 0 or row == height - 1 else "        │")
        for cell in cells:
            text.append(cell, style="bold yellow" if cell == "●" else "cyan")
        text.append("\n")
    text.append("        └" + "─" * width + "\n")
    last = f"step {len(line)}"
    text.append("         1" + last.rjust(width - 1))
    return text


class _Canvas:
    """A grid of characters; a line takes two by four points of each, in braille."""

    def __init__(self, width, height):
        self.width, self.height = width, height
        self.cells = [[" "] * width for _ in range(height)]

    def draw_line(self, values):
        """Values from 0 to 1, spread over the width."""
        columns = 2 * self.width
        places = [round((1 - _at(values, column / (columns - 1))) * (4 * self.height - 1)) for column in range(columns)]
        for column, place in enumerate(places):
            before = places[max(0, column - 1)]
            step = 1 if place >= before else -1
            for y in range(before + step if place != before else place, place + step, step):
                self._set_point(column, y)

    def draw_dots(self, values, every=4):
        for column in range(0, self.width, every):
            value = _at(values, (2 * column + 0.5) / (2 * self.width - 1))
            self.cells[round((1 - value) * (4 * self.height - 1)) // 4][column] = "●"

    def _set_point(self, x, y):
        bit = (0x01, 0x02, 0x04, 0x40, 0x08, 0x10, 0x20, 0x80)[4 * (x % 2) + y % 4]
        cell = self.cells[y // 4][x // 2]
        self.cells[y // 4][x // 2] = chr((0x2800 if cell == " " else ord(cell)) | bit)


def _at(values, share):
    """The value at a share of the way, between its two neighbours."""
    place = min(1.0, share) * (len(values) - 1)
    left = min(int(place), len(values) - 2) if len(values) > 1 else 0
    right = min(left + 1, len(values) - 1)
    return values[left] + (place - left) * (values[right] - values[left])


def share_bar(seconds, parts, width=24):
    """Where the time went, as a bar of one letter and colour for each part."""
    total = sum(seconds[name] for name in parts) or 1.0
    text, filled, reached = Text(), 0, 0.0
    for name, colour in parts.items():
        reached += seconds[name] / total
        cells = round(width * reached) - filled
        text.append(name[0] * cells, style=f"{colour} reverse")
        filled += cells
    return text


def digit(image):
    """An image of 8 x 8 pixels, two characters for each."""
    rows = (image.reshape(8, 8) * (len(SHADES) - 1)).round().to(torch.int64).tolist()
    return Text("\n".join("".join(2 * SHADES[level] for level in row) for row in rows), style="bold")


def answer(image, probabilities, truth):
    """An image beside what the network thinks it is."""
    bars = Text()
    guess = int(probabilities.argmax())
    for number, probability in enumerate(probabilities.tolist()):
        style = "" if number != guess else ("bold green" if guess == truth else "bold red")
        bars.append(f"{number} {'█' * round(12 * probability):<12} {probability:4.0%}\n", style=style)
    verdict = "right" if guess == truth else f"it is a {truth}"
    bars.append(f"says {guess}: {verdict}", style="green" if guess == truth else "red")
    bars.no_wrap = True
    grid = Table.grid(padding=(0, 2))
    grid.add_row(Text("\n") + digit(image), bars)
    return grid
