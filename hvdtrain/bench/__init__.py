"""Measurements of this machine, these hosts and this recipe.

Each module measures one thing on the ranks and gives a value of ``results``; ``job`` runs it on a rank; the command starts the
ranks and shows what they found. What is measured, and how, is in docs/bench.md.
"""
