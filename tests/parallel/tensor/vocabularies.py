"""Worlds, and vocabularies that their tensor ranks share: evenly, unevenly, or not all of them."""

VOCABULARIES = [
    ((("tensor", 1),), 7),
    ((("tensor", 2), ("data", 2)), 8),
    ((("tensor", 3),), 8),
    ((("tensor", 4),), 257),
    ((("tensor", 4),), 5),  # the last rank holds nothing
]
