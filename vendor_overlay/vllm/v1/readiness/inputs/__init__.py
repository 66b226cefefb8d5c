"""Inputs of a step: token ids, block tables, slot mappings, Mamba states."""
