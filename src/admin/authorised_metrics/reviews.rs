//! Whether a credential may read the metrics: from the cache, or by a review of an apiserver.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use aws_lc_rs::digest;
use jackstay_sys::clock;
use jackstay_sys::sockets::source::Source;
use tokio::sync::{mpsc, oneshot};

use super::review_cache::{Key, Known, ReviewCache, Verdict};
use super::source_rates::{Rate, SourceRates};

/// Reviews of unknown credentials for one source, and for all: an invented token must not make jackstay load the
/// apiservers.
const SOURCE_RATE: Rate = Rate { burst: 5, interval: Duration::from_secs(5) };
const TOTAL_RATE: Rate = Rate { burst: 30, interval: Duration::from_millis(500) };

/// Whether a client may read the metrics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Access {
    /// It may.
    Allowed,
    /// It has no valid credential.
    Unauthenticated,
    /// Its user may not.
    Forbidden,
    /// Too many reviews were asked for.
    Busy,
    /// No review was answered, with the reason.
    Unavailable(String),
}

impl Access {
    /// The label `outcome` of the metrics.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Allowed => "served",
            Self::Unauthenticated => "unauthenticated",
            Self::Forbidden => "forbidden",
            Self::Busy => "busy",
            Self::Unavailable(_) => "unavailable",
        }
    }
}

impl From<Verdict> for Access {
    fn from(verdict: Verdict) -> Self {
        match verdict {
            Verdict::Allowed => Self::Allowed,
            Verdict::Unauthenticated => Self::Unauthenticated,
            Verdict::Forbidden => Self::Forbidden,
        }
    }
}

/// What a client has shown.
pub enum Credential {
    /// A valid client certificate: its common name and organizations, which are user and groups.
    Certificate {
        /// The user.
        name: String,
        /// The groups.
        groups: Vec<String>,
    },
    /// A bearer token.
    Token(String),
}

impl Credential {
    fn key(&self) -> Key {
        let mut context = digest::Context::new(&digest::SHA256);
        let mut add = |text: &str| {
            context.update(&text.len().to_le_bytes());
            context.update(text.as_bytes());
        };
        match self {
            Self::Token(token) => add(token),
            Self::Certificate { name, groups } => {
                // No token is empty.
                add("");
                add(name);
                for group in groups {
                    add(group);
                }
            }
        }
        let mut key = Key::default();
        key.copy_from_slice(context.finish().as_ref());
        key
    }
}

/// A credential to review, and the channel for the answer. The error says why there is none.
pub struct Question {
    /// The credential.
    pub credential: Credential,
    /// The channel.
    pub answer: oneshot::Sender<Result<Verdict, String>>,
}

/// Reviews credentials.
pub struct Reviewer {
    questions: mpsc::Sender<Question>,
    cache: Mutex<ReviewCache>,
    rates: Mutex<(SourceRates<Source>, SourceRates<()>)>,
}

impl Reviewer {
    /// A reviewer without known credentials, whose questions a [`ReviewTask`](super::review_task) answers.
    pub fn new(questions: mpsc::Sender<Question>) -> Self {
        let rates = (SourceRates::new(SOURCE_RATE), SourceRates::new(TOTAL_RATE));
        Self { questions, cache: Mutex::default(), rates: Mutex::new(rates) }
    }

    /// Whether the owner of the credential may read the metrics.
    pub async fn review(&self, credential: Credential, source: Source) -> Access {
        let (key, now) = (credential.key(), clock::now());
        let known = lock(&self.cache).get(&key, now);
        if let Known::Fresh(verdict) = known {
            return verdict.into();
        }
        if known == Known::Unknown {
            let (sources, total) = &mut *lock(&self.rates);
            if !sources.admit(source, now) || !total.admit((), now) {
                return Access::Busy;
            }
        }
        match self.ask(credential).await {
            Ok(verdict) => {
                lock(&self.cache).insert(key, verdict, clock::now());
                verdict.into()
            }
            Err(_) if known == Known::Stale => Access::Allowed,
            Err(access) => access,
        }
    }

    async fn ask(&self, credential: Credential) -> Result<Verdict, Access> {
        let (answer, verdict) = oneshot::channel();
        let question = Question { credential, answer };
        self.questions.try_send(question).map_err(|_| Access::Busy)?;
        match verdict.await {
            Ok(Ok(verdict)) => Ok(verdict),
            Ok(Err(why)) => Err(Access::Unavailable(why)),
            Err(_) => Err(Access::Unavailable("the configuration has changed".to_owned())),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use super::super::review_cache::{ALLOWED_TTL, OUTAGE_TTL, REFUSED_TTL};
    use super::*;

    const SOURCE: Source = Source::Address(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)));

    fn token(text: &str) -> Credential {
        Credential::Token(text.to_owned())
    }

    /// Answers the next question, and returns whether there was one.
    async fn answered<T>(
        questions: &mut mpsc::Receiver<Question>,
        review: impl Future<Output = T>,
        answer: Result<Verdict, String>,
    ) -> (T, bool) {
        let mut asked = false;
        let answer = async {
            if let Some(question) = questions.recv().await {
                asked = true;
                let _ = question.answer.send(answer);
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            biased;
            result = review => (result, asked),
            () = answer => unreachable!(),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn review_asks_once_in_the_time_of_its_verdict_and_survives_an_outage() {
        let (sender, mut questions) = mpsc::channel(4);
        let reviewer = Reviewer::new(sender);
        let down = || Err("no apiserver".to_owned());
        let unavailable = Access::Unavailable("no apiserver".to_owned());
        let second = Duration::from_secs(1);
        // Time that passes before, the answer to a review, the access, whether a review was asked for.
        for (pause, answer, access, asked) in [
            (Duration::ZERO, down(), unavailable.clone(), true),
            (second, Ok(Verdict::Forbidden), Access::Forbidden, true),
            (second, down(), Access::Forbidden, false),
            (REFUSED_TTL, Ok(Verdict::Allowed), Access::Allowed, true),
            (ALLOWED_TTL.saturating_sub(second), down(), Access::Allowed, false),
            (second, down(), Access::Allowed, true),
            (OUTAGE_TTL.saturating_sub(ALLOWED_TTL + second), down(), Access::Allowed, true),
            (second, down(), unavailable, true),
        ] {
            tokio::time::advance(pause).await;
            let review = reviewer.review(token("t"), SOURCE);
            assert_eq!(answered(&mut questions, review, answer).await, (access, asked));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn review_limits_unknown_tokens_of_a_source_and_not_known_ones() {
        let (sender, mut questions) = mpsc::channel(4);
        let reviewer = Reviewer::new(sender);
        let known = reviewer.review(token("prometheus"), SOURCE);
        answered(&mut questions, known, Ok(Verdict::Allowed)).await;
        let mut busy = 0;
        for number in 0..20 {
            let review = reviewer.review(token(&number.to_string()), SOURCE);
            let (access, _) = answered(&mut questions, review, Ok(Verdict::Unauthenticated)).await;
            busy += usize::from(access == Access::Busy);
        }
        assert_eq!(busy, 16, "one of the burst was that of the known token");
        let review = reviewer.review(token("prometheus"), SOURCE);
        assert_eq!(answered(&mut questions, review, Ok(Verdict::Allowed)).await.0, Access::Allowed);
        // Also when it has to be reviewed again.
        tokio::time::advance(ALLOWED_TTL).await;
        for number in 20..40 {
            let review = reviewer.review(token(&number.to_string()), SOURCE);
            answered(&mut questions, review, Ok(Verdict::Unauthenticated)).await;
        }
        let review = reviewer.review(token("prometheus"), SOURCE);
        let answer = answered(&mut questions, review, Ok(Verdict::Allowed)).await;
        assert_eq!(answer, (Access::Allowed, true));
        let other = Source::Address(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 2)));
        let review = reviewer.review(token("new"), other);
        assert_eq!(answered(&mut questions, review, Ok(Verdict::Allowed)).await.0, Access::Allowed);
    }

    #[test]
    fn key_distinguishes_tokens_certificates_and_their_groups() {
        let certificate = |name: &str, groups: &[&str]| Credential::Certificate {
            name: name.into(),
            groups: groups.iter().map(|group| (*group).to_owned()).collect(),
        };
        let keys = [
            token("a"),
            token("ab"),
            certificate("a", &[]),
            certificate("a", &["b"]),
            certificate("ab", &[]),
            certificate("a", &["b", "c"]),
            certificate("a", &["bc"]),
        ]
        .map(|credential| credential.key());
        for (i, key) in keys.iter().enumerate() {
            assert!(!keys[..i].contains(key), "{i}");
        }
    }
}
