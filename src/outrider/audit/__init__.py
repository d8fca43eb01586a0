"""The proof as functions: `audit` compares drafters with plain decoding, `audit_company` a text with itself."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.audit.checks import ALPHA, Check, DrafterReport, Report, audit, chi_square, default_drafts
    from outrider.audit.company import CompanyReport, Variant, audit_company, write_references
    from outrider.audit.company_plan import CompanyPlan
    from outrider.audit.compare import Difference
    from outrider.audit.references import ReferenceStore

__all__ = [
    "ALPHA",
    "Check",
    "CompanyPlan",
    "CompanyReport",
    "Difference",
    "DrafterReport",
    "ReferenceStore",
    "Report",
    "Variant",
    "audit",
    "audit_company",
    "chi_square",
    "default_drafts",
    "write_references",
]

# Imported when it is asked for, as in outrider/__init__.py: `outrider audit --help` needs the plan and no torch.
_HOMES = {
    **dict.fromkeys(("ALPHA", "Check", "DrafterReport", "Report", "audit", "chi_square", "default_drafts"), "checks"),
    **dict.fromkeys(("CompanyReport", "Variant", "audit_company", "write_references"), "company"),
    "CompanyPlan": "company_plan",
    "Difference": "compare",
    "ReferenceStore": "references",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'outrider.audit' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"outrider.audit.{_HOMES[name]}"), name)
    return value
