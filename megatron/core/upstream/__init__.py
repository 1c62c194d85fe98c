"""Upstream's names: for programs that were written for Megatron-LM. Nothing inside megatron/ imports this room.

names           which names stand where (one table), and what is said of those that do not exist
"""
