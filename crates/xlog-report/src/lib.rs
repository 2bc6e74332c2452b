//! Reports on the memory use of an allocation log: a page, a text, figures or a picture.
//!
//! | item | purpose |
//! |---|---|
//! | [`Input`] | a log that can be read any number of times, even from a pipe |
//! | [`Analysis`] | the contents of a report on one log |
//! | [`compare`] | the comparison of two logs |
//! | [`html`], [`text`], [`picture`], [`figures`] | an analysis for a browser, a terminal, a document, a program |
//! | [`text_report`], [`plot`], [`escape`] | aligned lines, small charts, names that cannot control a terminal |
//!
//! It writes no files: the caller gets bytes and texts.

#![deny(unsafe_code)]

mod address_map;
mod analysis;
mod block_data;
mod blocks;
pub mod compare;
mod completeness;
mod data;
pub mod figures;
mod format;
pub mod html;
mod input;
mod lanes;
mod lifetimes;
mod lives;
pub mod picture;
pub mod plot;
mod reserved_ranges;
mod scan;
mod segments;
pub mod text;
pub mod text_report;
mod timeline;

pub use analysis::{Analysis, analyse};
pub use format::LogFormat;
pub use input::{Input, ReadingReport, Strict, Trouble, Watched};
pub use scan::{Demand, check};
pub use xlog_base::escape;
