"""Names, goods, and questions that need no picture."""

from __future__ import annotations

import random

from prism_server.demo_model.drawing import COLOR_NAMES
from prism_server.demo_model.turns import Turn

_GOODS = (
    "pens lamps cups books chairs desks bags boxes pipes bolts tiles ropes plates forks knives spoons towels candles "
    "clocks mirrors shelves carpets pillows brushes hammers nails screws ladders buckets hoses seeds pots shirts shoes "
    "hats gloves cables plugs screens mugs"
)
_SYLLABLES = "ma no ra li ka to be sa vi do ne lu pa ri mi jo te ga fe zo"

GOODS = tuple(_GOODS.split())
SYLLABLES = tuple(_SYLLABLES.split())

GREETING = "Hello! Show me a picture with shapes, an invoice or a short clip, and ask."
WHO = "I am the Prism demo model, a tiny vision model."
HELP = "I can name shapes and colors, count, read invoices and follow short clips."


def made_up_name(rng: random.Random) -> str:
    """A name of two or three syllables: `Kavi`, `Noralu`."""
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.choice([2, 2, 3]))).capitalize()


def text_turn(rng: random.Random) -> Turn:
    """A greeting, a sum, or words to repeat."""
    match rng.randrange(5):
        case 0:
            return Turn("hello", rng.choice(["Hello", "Hello!", "Hi", "Hi!", "Good morning"]), GREETING)
        case 1:
            return Turn("who", rng.choice(["Who are you?", "What are you?"]), WHO)
        case 2:
            first, second = rng.randint(0, 20), rng.randint(0, 20)
            return Turn("sum", f"What is {first} plus {second}?", str(first + second))
        case 3:
            words = " ".join(_word(rng) for _ in range(rng.randint(1, 6)))
            return Turn("repeat", f"Repeat: {words}", words)
        case _:
            return Turn("help", rng.choice(["What can you do?", "Help"]), HELP)


def _word(rng: random.Random) -> str:
    return rng.choice([made_up_name(rng), rng.choice(GOODS), str(rng.randint(0, 999)), rng.choice(COLOR_NAMES)])
