"""The catalogue of planted faults."""

from __future__ import annotations

from tests.mutants import faults_of_data, faults_of_gradients, faults_of_libraries, faults_of_resume, faults_of_updates
from tests.mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    *faults_of_data.MUTANTS,
    *faults_of_gradients.MUTANTS,
    *faults_of_updates.MUTANTS,
    *faults_of_resume.MUTANTS,
    *faults_of_libraries.MUTANTS,
)
"""All faults, in the order of the table in docs/verify.md."""
