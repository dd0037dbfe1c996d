"""The vocabulary: ops, facts, programs, the editing door, views, the printer, the verifier.

Knows `torch.fx` and nothing else of zerofx but errors and privates; every other folder may import
it. Modules: spec, parcels, error_bands, kernels, ops, facts, program, edit, codes, view, text,
meaning, border, case, code_rules, gradient_rules, node_rules, return_rules, value_rules,
write_rules, rules, verify, cut.
"""
