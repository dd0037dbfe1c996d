"""Looking at programs: dumped ones (compare), and those of a model or script (explanation).

Needs no ranks. Modules: compare, reports; captured, record, script: what a program does under
Dynamo; outcome, runs, changes, decisions: what is made of it, and what else could be; explanation,
explain_text, explain: all of it on one screen.
"""
