"""Short prompts of our own in four sets, for what depends on the text: methods of speculation.

`repeat`: what an answer mostly copies from its prompt. `mixed` has digits and rare words, which no
proposer knows. Knows no file; `prompts` reads those.
"""

from __future__ import annotations

from paceline.bench.prompts import Prompt

_CHAT = (
    "Why is the sky blue? Answer in two sentences.",
    "Give me three tips for a good night's sleep.",
    "Write a short letter that invites a friend to dinner on Friday.",
    "What is the difference between a lake and a pond?",
    "Tell me a story about a fox who learns to swim.",
    "How do I make a cup of green tea?",
    "What should I pack for a weekend in the mountains?",
    "Explain what a library is to a child of five.",
)

_CODE = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "Write a Python class for a stack with push, pop and peek.",
    "Write a Python function that counts the words of a text file.",
    "Write a function in C that reverses a string in place.",
    "Write a SQL query that lists all customers without an order.",
    "Write a Python function that checks whether a number is prime, with a docstring.",
    "Write a shell loop that renames all .txt files of a folder to .md.",
    "Write a JavaScript function that removes the duplicates of an array.",
)

_HARBOR = (
    "The harbor of Vessmar lies at the mouth of the river Ilde. Every morning the fishing boats"
    " leave before sunrise and return at noon with herring and cod. The old lighthouse on the"
    " eastern pier was built in 1874 and still guides the ships at night. In summer the harbor"
    " market sells fresh fish, bread and flowers to visitors from the whole coast."
)
_REPORT = (
    "The board of the Ellendale Gardening Society met on 4 March. Eleven members were present."
    " The treasurer reported that the society has 2,310 dollars in the bank. The members decided"
    " to plant forty apple trees along the northern path and to repair the greenhouse roof before"
    " the first of May. The next meeting is on 8 April at the town hall."
)
_MACHINE = (
    "The model K20 coffee machine has a water tank of two liters. Fill the tank with cold water,"
    " close the lid and press the green button. The machine needs ninety seconds to heat up. Clean"
    " the filter once a week with warm water. Do not put the filter into the dishwasher."
)
_TOTALS = """def total_price(items, tax_rate):
    total = 0
    for item in items:
        price = item["price"] * item["quantity"]
        total = total + price
    tax = total * tax_rate
    return total + tax"""
_CART = """class ShoppingCart:
    def __init__(self, owner):
        self.owner = owner
        self.items = []

    def add_item(self, name, price):
        self.items.append((name, price))

    def remove_item(self, name):
        self.items = [item for item in self.items if item[0] != name]

    def total(self):
        return sum(price for name, price in self.items)"""
_CSV = """name,city,age
Anna,Berlin,34
Boris,Madrid,27
Clara,Lisbon,45
David,Vienna,31
Elena,Athens,29"""
_JSON = (
    '{"name": "Anna Fields", "address": {"street": "12 Mill Road", "city": "Northport"},'
    ' "orders": [{"id": 1001, "item": "desk lamp"}, {"id": 1002, "item": "office chair"}],'
    ' "newsletter": true}'
)
_LIST = """- oat milk
- two loaves of rye bread
- six eggs
- a bag of red apples
- butter
- black tea
- tomato soup
- dish soap"""

_REPEAT = (
    f"Repeat this text word for word:\n\n{_HARBOR}",
    f"Correct the spelling of this text and write it again in full:\n\n{_REPORT}",
    f"Summarize this text by quoting its most important sentences:\n\n{_HARBOR} {_REPORT}",
    f"Rewrite this function with `total` renamed to `subtotal`:\n\n```python\n{_TOTALS}\n```",
    f"Rewrite this class with a docstring in every method:\n\n```python\n{_CART}\n```",
    f"Write this table again with the names in capital letters:\n\n{_CSV}",
    f"Format this JSON with an indent of two spaces:\n\n{_JSON}",
    f"Copy this list and put a number in front of each line:\n\n{_LIST}",
    f"Copy this manual, with K20 replaced by K30:\n\n{_MACHINE}",
    f"Rewrite this function with type hints:\n\n```python\n{_TOTALS}\n```",
)

_MIXED = (
    "Zyx qoph 9134 lumbar vint? Answer with numbers.",
    "Invent a list of ten product codes, such as QX-7741-B.",
    "Translate into French: the train leaves at a quarter past nine.",
    "7, 19, 3, 88, 41, 60: which of these are odd?",
    "Write five random words and use each in a sentence.",
    "Name a rare mineral and three of its properties.",
    "Write a poem without the letter e.",
    "What is 4817 times 293? Work step by step.",
)

SETS: dict[str, tuple[str, ...]] = {
    "chat": _CHAT,
    "code": _CODE,
    "repeat": _REPEAT,
    "mixed": _MIXED,
}


def prompt_set(name: str) -> list[Prompt]:
    """A set's prompts, in order; `name` is one of SETS."""
    return [
        Prompt(f"{name}-{number}", name, text, is_text=True)
        for number, text in enumerate(SETS[name])
    ]
