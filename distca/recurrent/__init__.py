"""Cores of recurrent layers (linear attention, SSM): gated delta rule and Mamba-2."""

from distca.plan.recurrence import Recurrence
from distca.recurrent.convolution import CoreParameters
from distca.recurrent.kernel import CoreRows, RecurrentKernel, Span, carried
from distca.recurrent.select import choose_recurrent_kernel

__all__ = [
    "CoreParameters",
    "CoreRows",
    "Recurrence",
    "RecurrentKernel",
    "Span",
    "carried",
    "choose_recurrent_kernel",
]
