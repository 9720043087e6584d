//! Bodies by example and by property, and errors against the users' page.

mod asks;
mod errors;
mod splices;
