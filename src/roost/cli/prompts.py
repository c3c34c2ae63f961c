"""Prompts for a quick measurement, written for this project.

Everyday questions of different lengths; none is of a public evaluation set. Used by `bench` when no file is given.
"""

PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Explain to a ten-year-old why the sky is blue.",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "List five things to check before a long bicycle tour.",
    "How does a heat pump work? Answer in simple words.",
    "Write a Python function that tells whether a word reads the same backwards.",
    "My neighbour's dog barks at night. Draft a polite letter to him.",
    "What is the difference between weather and climate?",
    "Give me a recipe for a lentil soup with what most people have at home.",
    "Summarise the plot of a play about two families who are enemies and whose children fall in love.",
    "Why do leaves change their colour in autumn?",
    "Explain what a hash table is and when one should not use it.",
    "Plan a weekend in a small town by the sea for a family with two children.",
    "Translate into plain English: 'The party of the first part shall indemnify the party of the second part.'",
    "Write a haiku about the first snow.",
    "What should I know before I adopt an old cat?",
)
