"""The proof as functions: `audit` compares drafters with plain decoding, `audit_company` a text with itself."""

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
