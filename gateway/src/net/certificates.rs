//! Validity of the certificates that the gateway presents: those of its listeners, and those for workers and replicas.
//!
//! TLS libraries present an expired certificate without an error; its peers reject it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{CertificateError, Error, RootCertStore};

use super::tls::certificates;
use crate::observe::clock::unix_time;
use crate::observe::page::CERTIFICATE_EXPIRY;
use crate::settings::Settings;

/// Maximum remaining time of a reported certificate; at most a tenth of its lifetime.
const SOON: Duration = Duration::from_secs(14 * 86_400);

/// Interval of reports.
const REPORT_EVERY: Duration = Duration::from_secs(12 * 3_600);

/// Validity of a chain, in time since 1970.
#[derive(Clone, Debug)]
pub struct Certificate {
    setting: &'static str,
    file: PathBuf,
    from: Duration,
    until: Duration,
}

impl Certificate {
    /// Reads all configured certificates. Unreadable ones are errors of their users.
    pub fn all(settings: &Settings) -> Vec<Self> {
        settings.certificate_files().filter_map(|(setting, file)| Self::read(setting, file)).collect()
    }

    fn read(setting: &'static str, file: &Path) -> Option<Self> {
        let chain = certificates(file).ok()?;
        let validity: Option<Vec<_>> = chain.iter().map(validity).collect();
        let (from, until) = validity?.into_iter().reduce(|one, other| (one.0.max(other.0), one.1.min(other.1)))?;
        Some(Self { setting, file: file.to_owned(), from, until })
    }

    /// Description of a certificate that is not valid, or not for long.
    pub fn warning(&self) -> Option<String> {
        self.warning_at(unix_time())
    }

    fn warning_at(&self, now: Duration) -> Option<String> {
        let Self { setting, file, from, until } = self;
        let soon = SOON.min(until.saturating_sub(*from) / 10);
        let hours = until.abs_diff(now).as_secs() / 3_600;
        let state = match () {
            () if now < *from => "is not valid yet".to_owned(),
            () if now > *until => format!("expired {hours} hours ago"),
            () if now + soon > *until => format!("expires in {hours} hours"),
            () => return None,
        };
        Some(format!("{setting} is {}, with a certificate that {state}", file.display()))
    }

    /// Exports the validity of all and logs those that are not valid for long.
    pub(crate) fn report(all: &[Self]) {
        for certificate in all {
            metrics::gauge!(CERTIFICATE_EXPIRY.name, "setting" => certificate.setting)
                .set(certificate.until.as_secs_f64());
            if let Some(warning) = certificate.warning() {
                tracing::warn!("{warning}");
            }
        }
    }

    /// Reports the latest certificates periodically, forever.
    pub(crate) async fn keep_reporting(latest: impl Fn() -> Arc<Vec<Self>>) {
        loop {
            Self::report(&latest());
            tokio::time::sleep(REPORT_EVERY).await;
        }
    }
}

/// Start and end of the validity. The verifier reports them for a time outside.
fn validity(certificate: &CertificateDer<'_>) -> Option<(Duration, Duration)> {
    let parsed = ParsedCertificate::try_from(certificate).ok()?;
    let at = |seconds| {
        let now = UnixTime::since_unix_epoch(Duration::from_secs(seconds));
        match verify_server_cert_signed_by_trust_anchor(&parsed, &RootCertStore::empty(), &[], now, &[]) {
            Err(Error::InvalidCertificate(CertificateError::NotValidYetContext { not_before: bound, .. })) => {
                Some(bound)
            }
            Err(Error::InvalidCertificate(CertificateError::ExpiredContext { not_after: bound, .. })) => Some(bound),
            _ => None,
        }
    };
    let [from, until] = [at(0), at(u64::MAX)].map(|bound| bound.map(|time| Duration::from_secs(time.as_secs())));
    from.zip(until)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_secs(86_400);

    /// 2020-01-01, a leap year.
    const START: Duration = Duration::from_secs(1_577_836_800);

    #[test]
    fn certificates_outside_of_their_validity_are_reported() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tls/expired-test-only.crt");
        let read = Certificate::read("gateway.tls_certificate_file", &file).expect("a certificate");
        assert_eq!((read.from, read.until), (START, START + 366 * DAY));
        let state = |now: Duration| {
            let warning = read.warning_at(now)?;
            assert!(warning.starts_with("gateway.tls_certificate_file is "), "{warning}");
            Some(warning.rsplit_once(" that ").expect("a state").1.to_owned())
        };
        assert_eq!(state(START - DAY).as_deref(), Some("is not valid yet"));
        assert_eq!((state(START), state(START + 351 * DAY)), (None, None));
        assert_eq!(state(START + 356 * DAY).as_deref(), Some("expires in 240 hours"));
        assert_eq!(state(START + 367 * DAY).as_deref(), Some("expired 24 hours ago"));
    }
}
